from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers.merging import accept, encoded, init_of, make_update
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fleetddp.common import publish as publish_module
from fleetddp.common import version_file
from fleetddp.common.config import Constant, FleetConfig, MergeConfig, StalenessConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.events import Decision
from fleetddp.common.files import File, OsFiles
from fleetddp.common.journal import Journal
from fleetddp.common.layout import Layout
from fleetddp.common.merge import Operand, plan
from fleetddp.common.payload import Geometry, tensor_over
from fleetddp.common.publish import Publisher, save_init
from fleetddp.common.update import Kind, Tier, Update, Version
from fleetddp.common.version_file import VersionFile

AS_ONE = MergeConfig(staleness=StalenessConfig(discount=Constant()))
LAYOUT = Layout.of([("w", (41, 37)), ("empty", (0, 3)), ("scale", ())], [("mean", (5,)), ("seen", ())])  # 1518 parameters
ODD = Layout.of([("w", (1539,))], [("mean", (3,))])
PUBLISHED = ["float32", "bfloat16", "int8"]


@pytest.fixture(params=PUBLISHED)
def published(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Fleet:
    """A journal and a publisher, and what is needed to take them from version to version."""

    def __init__(self, directory: Path, layout: Layout, start: Tensor, **config: Any) -> None:
        self.layout, self.start = layout, start
        self.config = FleetConfig.model_validate({"merge": AS_ONE, **config})
        self.files = CountingFiles()
        self.journal = Journal(directory, run="run", files=self.files)
        self.publisher = Publisher(self.journal, self.config)
        self.directory = directory

    def found(self) -> Version:
        return self.publisher.found(accept(self.journal, init_of(self.layout), self.layout, self.start), at=1.0)

    def decision(self, updates: Sequence[Update], version: int) -> Decision:
        ids = tuple(sorted(u.update_id for u in updates))
        terms, metrics = plan(updates, version, self.config.merge), {"loss": 0.5}
        return Decision(version=version, at=10.0 + version, terms=terms, ids=ids, leaf_ids=ids, reason="test", metrics=metrics)

    def merge(self, updates: Sequence[tuple[Update, Tensor]], version: int) -> Version:
        for update, values in updates:
            accept(self.journal, update, self.layout, values)
        return self.publisher.merge(self.decision([u for u, _ in updates], version))

    def delta(self, node: str, values: Tensor, version: int, **given: Any) -> tuple[Update, Tensor]:
        return make_update(node, layout=self.layout, sequence=version, base=version - 1, **given), values

    def payload(self, version: int) -> bytes:
        with self.journal.read_version(version) as reader:
            return reader.read(0, reader.size)

    def weights(self, version: int) -> Tensor:
        """What a member sees: the decoded published payload, f32[elements]."""
        with self.journal.read_version(version) as reader:
            info = reader.info
        geometry = Geometry(self.layout, publish_module.codecs.get(info.codec))
        data = tensor_over(self.payload(version))
        out = torch.zeros(self.layout.elements)
        for interval in geometry.required():
            out[slice(*interval)] = geometry.decode(data[slice(*geometry.byte_range(interval))], interval)
        return out

    def exact(self, version: int) -> Tensor:
        """The weights before rounding, of the parameters."""
        with self.journal.read_version(version) as reader:
            return VersionFile(reader).weights((0, self.layout.parameters), torch.empty(self.layout.parameters))

    def path(self, version: int) -> Path:
        return self.directory / "versions" / f"{version}.safetensors"

    def digest(self, version: int) -> str:
        return hashlib.sha256(self.path(version).read_bytes()).hexdigest()


class CountingFile:
    def __init__(self, file: File, files: CountingFiles) -> None:
        self._file, self._files = file, files

    def pread(self, size: int, offset: int) -> bytes:
        self._files.longest_read = max(self._files.longest_read, size)
        return self._file.pread(size, offset)

    def close(self) -> None:
        self._files.open_now.discard(id(self))
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class CountingFiles(OsFiles):
    """Knows how many files were open at once, and how much was read at once."""

    def __init__(self) -> None:
        self.open_now: set[int] = set()
        self.most_open = self.longest_read = 0

    def _count(self, file: File) -> Any:
        counted = CountingFile(file, self)
        self.open_now.add(id(counted))
        self.most_open = max(self.most_open, len(self.open_now))
        return counted

    def create(self, path: Path) -> Any:
        return self._count(super().create(path))

    def open(self, path: Path) -> Any:
        return self._count(super().open(path))


def vector(layout: Layout, seed: int) -> Tensor:
    values = torch.randn(layout.elements, generator=torch.Generator().manual_seed(seed))
    values[layout.parameters : layout.buffer_start] = 0.0
    return values


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block far smaller than the model, so that everything happens over several blocks."""
    for module in (version_file, publish_module):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 512)


# ---- what is published -----------------------------------------------------------------------------------------------------


def test_version_0_is_the_init_bit_for_bit(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LAYOUT, vector(LAYOUT, 1))
    version = fleet.found()
    assert torch.equal(fleet.weights(0), fleet.start)
    assert (version.number, version.codec, version.updates, version.published_at) == (0, "float32", 0, 1.0)
    assert version.layout == LAYOUT.fingerprint
    assert fleet.payload(0) == encoded(init_of(LAYOUT).header, LAYOUT, [fleet.start])


@pytest.mark.parametrize("layout", [LAYOUT, ODD], ids=["even", "odd"])
def test_the_payload_is_canonical_and_its_digest_right(tmp_path: Path, layout: Layout, published: str) -> None:
    fleet = Fleet(tmp_path, layout, vector(layout, 1), publish=published, outer={"preset": "diloco"})
    fleet.found()
    for number in (1, 2):
        version = fleet.merge([fleet.delta("a", vector(layout, number) * 0.1, number, samples=2)], number)
        payload = fleet.payload(number)
        exact = torch.cat([fleet.exact(number), torch.zeros(layout.elements - layout.parameters)])
        exact[layout.buffer_start :] = vector(layout, number)[layout.buffer_start :] * 0.1
        assert payload == encoded(make_update("x", codec=published, layout=layout).header, layout, [exact])
        assert version.digest == google_crc32c.value(payload)
        assert version.payload_bytes == len(payload)
        assert (version.updates, version.metrics, version.published_at) == (1, {"loss": 0.5}, 10.0 + number)
        with fleet.journal.read_version(number) as reader:
            assert reader.info == version
            head = VersionFile(reader).head
        assert (head.number, head.digest, head.updates, head.codec) == (number, version.digest, 1, published)


@pytest.mark.parametrize("layout", [LAYOUT, ODD], ids=["even", "odd"])
def test_any_safetensors_reader_opens_a_version(tmp_path: Path, layout: Layout, published: str) -> None:
    fleet = Fleet(tmp_path, layout, vector(layout, 1), publish=published, outer={"preset": "diloco"})
    fleet.found()
    fleet.merge([fleet.delta("a", vector(layout, 2), 1)], 1)
    tensors = load_file(fleet.path(1))
    weights = fleet.weights(1)
    for spec in layout.tensors:
        expected = weights[spec.start : spec.stop].reshape(spec.shape)
        if spec.role == "buffer":
            assert torch.equal(tensors[spec.name], expected)
        elif published == "int8":
            assert spec.name not in tensors
        else:
            assert tensors[spec.name].dtype == getattr(torch, published)
            assert torch.equal(tensors[spec.name].float(), expected)
    assert ("__published__" in tensors) == (published == "int8")
    assert ("__master__" in tensors) == (published != "float32")
    assert tensors["__outer__.momentum_buffer"].shape == (layout.parameters,)


# ---- the merge -------------------------------------------------------------------------------------------------------------


def test_full_participation_equals_a_hand_written_fedavg(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(n, 12), torch.randn(n, 3)) for n in (5, 20, 11)]
    model = nn.Linear(12, 3)
    layout = Layout.from_module(model)
    fleet = Fleet(tmp_path, layout, layout.read(model))
    fleet.found()

    def train(start: Tensor, x: Tensor, y: Tensor) -> Tensor:
        local = nn.Linear(12, 3)
        layout.write_(local, start)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.05)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(local(x), y).backward()
            optimizer.step()
        return layout.read(local)

    by_hand = fleet.start.double()
    for number in range(1, 6):
        base = fleet.weights(number - 1)
        fleet.merge([fleet.delta(f"m{i}", base - train(base, *d), number, samples=len(d[0])) for i, d in enumerate(data)], number)
        locals_by_hand = [train(by_hand.float(), *d).double() for d in data]
        by_hand = sum(len(d[0]) * w for d, w in zip(data, locals_by_hand, strict=True)) / 36  # type: ignore[assignment]
        assert (fleet.weights(number).double() - by_hand).abs().max() < 1e-6
    assert (fleet.weights(5) - fleet.start).abs().max() > 0.01


@pytest.mark.usefixtures("_small_blocks")
def test_outer_state_goes_from_version_to_version_as_in_torch(tmp_path: Path, published: str) -> None:
    for name, options in (("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}), ("Adam", {"lr": 0.1, "amsgrad": True})):
        outer = {"optimizer": name, "options": options}
        fleet = Fleet(tmp_path / name, LAYOUT, vector(LAYOUT, 1), publish=published, outer=outer)
        fleet.found()
        parameter = fleet.start[: LAYOUT.parameters].clone().requires_grad_()
        reference = getattr(torch.optim, name)([parameter], foreach=False, **options)
        for number in range(1, 5):
            delta = vector(LAYOUT, 10 + number)
            fleet.merge([fleet.delta("a", delta, number)], number)
            parameter.grad = delta[: LAYOUT.parameters].clone()
            reference.step()
            assert torch.equal(fleet.exact(number), parameter)


def test_another_outer_optimizer_starts_afresh(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LAYOUT, vector(LAYOUT, 1), outer={"preset": "diloco"})
    fleet.found()
    fleet.merge([fleet.delta("a", vector(LAYOUT, 2), 1)], 1)
    fleet.publisher = Publisher(fleet.journal, FleetConfig.model_validate({"outer": {"optimizer": "Adam"}}))
    fleet.merge([fleet.delta("a", vector(LAYOUT, 3), 2)], 2)
    parameter = fleet.exact(1).requires_grad_()
    parameter.grad = vector(LAYOUT, 3)[: LAYOUT.parameters].clone()
    torch.optim.Adam([parameter], foreach=False).step()
    assert torch.equal(fleet.exact(2), parameter)


@pytest.mark.usefixtures("_small_blocks")
def test_buffers_are_averaged_and_never_stepped_by_the_optimizer(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LAYOUT, vector(LAYOUT, 1), outer={"optimizer": "SGD", "options": {"lr": 0.1, "momentum": 0.9}})
    fleet.found()
    buffers = slice(LAYOUT.buffer_start, LAYOUT.elements)
    a, b = vector(LAYOUT, 2), vector(LAYOUT, 3)
    fleet.merge([fleet.delta("a", a, 1, samples=1), fleet.delta("b", b, 1, samples=3)], 1)
    expected = (a[buffers].double() * 0.25 + b[buffers].double() * 0.75).float()
    assert torch.equal(fleet.weights(1)[buffers], expected)
    # A gradient carries none: the buffers stay as they were.
    fleet.merge([fleet.delta("a", vector(LAYOUT, 4), 2, kind=Kind.GRADIENT)], 2)
    assert torch.equal(fleet.weights(2)[buffers], expected)
    assert not torch.equal(fleet.weights(2)[: LAYOUT.parameters], fleet.weights(1)[: LAYOUT.parameters])


def test_updates_in_any_codec_are_merged(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LAYOUT, vector(LAYOUT, 1))
    fleet.found()
    specs = ["float32", "bfloat16", "int8", "int4", "topk:0.5"]
    updates = [fleet.delta(f"m{i}", vector(LAYOUT, i + 2) * 0.01, 1, codec=spec) for i, spec in enumerate(specs)]
    fleet.merge(updates, 1)
    decoded = torch.zeros(LAYOUT.parameters, dtype=torch.float64)
    for update, values in updates:
        codec = publish_module.codecs.get(update.header.codec)
        parameters = values[: LAYOUT.parameters]
        decoded += codec.decode(codec.encode(parameters), LAYOUT.parameters).double() / 5
    expected = fleet.start[: LAYOUT.parameters].double() - decoded
    assert (fleet.exact(1).double() - expected).abs().max() < 1e-6


# ---- published bytes are the truth -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", ["bfloat16", "int8"])
def test_the_rounding_error_is_carried_and_does_not_drift(tmp_path: Path, published: str) -> None:
    """Each step is far below what the codec can resolve at this size; together they must move the published weights."""
    layout = Layout.of([("w", (512,))])
    start = torch.cat([torch.tensor([1.5]), torch.linspace(0.9, 1.1, 511)])  # the first stays: it fixes the scale of int8
    fleet = Fleet(tmp_path, layout, start, publish=published)
    fleet.found()
    step = torch.cat([torch.zeros(1), torch.full((511,), 1e-4)])
    rounding = (fleet.weights(0) - start).abs().max().item()
    assert rounding > 1e-3
    first = fleet.weights(0)
    fleet.merge([fleet.delta("a", step, 1)], 1)
    assert (fleet.weights(1) == first).float().mean() > 0.8  # most steps are rounded away when taken alone
    for number in range(2, 101):
        fleet.merge([fleet.delta("a", step, number)], number)
    exact = start.double() - 100 * step.double()
    assert (fleet.exact(100).double() - exact).abs().max() < 1e-5
    # The published weights are one rounding away from the exact ones, not a hundred.
    assert (fleet.weights(100).double() - exact).abs().max() < 1.1 * rounding + 1e-5
    assert (fleet.weights(100) - first).mean().item() == pytest.approx(-0.01, abs=2e-3)


def test_the_codec_of_publishing_may_change_in_a_run(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LAYOUT, vector(LAYOUT, 1), publish="int8")
    fleet.found()
    fleet.publisher = Publisher(fleet.journal, FleetConfig())
    version = fleet.merge([fleet.delta("a", torch.zeros(LAYOUT.elements), 1)], 1)
    assert version.codec == "float32"
    assert torch.equal(fleet.weights(1)[: LAYOUT.parameters], fleet.start[: LAYOUT.parameters])  # the exact ones, not the rounded


# ---- determinism and memory ------------------------------------------------------------------------------------------------


def history(directory: Path, published: str, order: int = 1) -> list[str]:
    fleet = Fleet(directory, LAYOUT, vector(LAYOUT, 1), publish=published, outer={"optimizer": "Adam", "options": {"lr": 0.01}})
    fleet.found()
    for number in (1, 2):
        codecs = ["float32", "int8", "topk:0.1"]
        updates = [fleet.delta(f"m{i}", vector(LAYOUT, 7 * number + i), number, codec=c) for i, c in enumerate(codecs)]
        fleet.merge(updates[::order], number)
    fleet.journal.close()
    return [fleet.digest(number) for number in (0, 1, 2)]


def test_the_same_decision_and_payloads_give_the_same_file(
    tmp_path: Path, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = history(tmp_path / "first", published)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        assert history(tmp_path / "threads", published, order=-1) == first
    finally:
        torch.set_num_threads(threads)
    for module in (version_file, publish_module):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1024)
    assert history(tmp_path / "blocks", published) == first


def test_merging_again_after_a_crash_gives_the_same_file(tmp_path: Path) -> None:
    def crash(point: str) -> None:
        if point == "publish:renamed":
            raise KeyboardInterrupt

    fleet = Fleet(tmp_path, LAYOUT, vector(LAYOUT, 1))
    fleet.found()
    update, values = fleet.delta("a", vector(LAYOUT, 2), 1)
    accept(fleet.journal, update, LAYOUT, values)
    fleet.journal.at = crash
    with pytest.raises(KeyboardInterrupt):
        fleet.publisher.merge(fleet.decision([update], 1))
    torn = fleet.digest(1)
    fleet.journal.close()
    again = Fleet(tmp_path, LAYOUT, fleet.start)
    decision = again.journal.recover().decision
    assert decision is not None
    again.publisher.merge(decision)
    assert again.digest(1) == torn


@pytest.mark.usefixtures("_small_blocks")
def test_memory_is_one_block_whatever_the_number_of_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, LAYOUT, vector(LAYOUT, 1))
    fleet.found()
    updates = [fleet.delta(f"m{i:02}", vector(LAYOUT, i + 2), 1) for i in range(40)]
    for update, values in updates:
        accept(fleet.journal, update, LAYOUT, values)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    calls = 0
    values_of = Operand.values

    def watched(self: Operand, row: int, interval: tuple[int, int]) -> Tensor:
        nonlocal calls
        calls += 1
        assert len(alive) == 0  # the block before was let go
        assert interval[1] - interval[0] <= 512
        values = values_of(self, row, interval)
        alive.add(values)
        return values

    monkeypatch.setattr(Operand, "values", watched)
    fleet.files.most_open = fleet.files.longest_read = 0
    fleet.publisher.merge(fleet.decision([u for u, _ in updates], 1))
    assert calls == 40 * 4  # three blocks of parameters, one of buffers
    assert fleet.files.most_open == 3  # the version before, the draft, one payload
    assert fleet.files.longest_read <= 4 * 512
    expected = fleet.start.double() - torch.stack([values.double() for _, values in updates]).mean(0)
    assert (fleet.exact(1).double() - expected[: LAYOUT.parameters]).abs().max() < 1e-6


# ---- start.file ------------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 30), nn.BatchNorm1d(30), nn.Linear(30, 3)).to(torch.float32)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_fleet_starts_from_a_saved_module(tmp_path: Path, buffers: Any) -> None:
    module = network()
    save_init(module, tmp_path / "init.safetensors", buffers=buffers)
    layout = Layout.from_module(module, buffers=buffers)
    fleet = Fleet(tmp_path / "journal", layout, layout.read(module))
    version = fleet.publisher.found_file(tmp_path / "init.safetensors", at=2.0)
    assert (version.number, version.published_at, version.layout) == (0, 2.0, layout.fingerprint)
    assert torch.equal(fleet.weights(0), fleet.start)
    assert fleet.journal.recover().layout == layout
    for name, tensor in load_file(tmp_path / "init.safetensors").items():
        assert torch.equal(tensor, module.state_dict()[name])


def test_a_fleet_starts_from_the_exact_weights_of_another_ones_version(tmp_path: Path) -> None:
    first = Fleet(tmp_path / "first", ODD, vector(ODD, 1), publish="int8", outer={"preset": "diloco"})
    first.found()
    first.merge([first.delta("a", vector(ODD, 2), 1)], 1)
    second = Fleet(tmp_path / "second", ODD, first.start)
    second.publisher.found_file(first.path(1), at=0.0)
    assert torch.equal(second.exact(0), first.exact(1))
    assert torch.equal(second.weights(0)[ODD.buffer_start :], first.weights(1)[ODD.buffer_start :])


def test_a_file_that_is_no_version_is_refused(tmp_path: Path) -> None:
    publisher = Fleet(tmp_path / "journal", LAYOUT, vector(LAYOUT, 1)).publisher
    with pytest.raises(ConfigError, match=r"start\.file: cannot read .*nowhere"):
        publisher.found_file(tmp_path / "nowhere", at=0.0)
    plain = tmp_path / "plain.safetensors"
    save_file({"w": torch.zeros(3)}, plain)
    with pytest.raises(ConfigError, match=r"plain\.safetensors is not a version file.*save_init"):
        publisher.found_file(plain, at=0.0)
    for junk in (b"", b"\xff" * 100, b"\x08" + b"\0" * 7 + b"notjson!", b"\x02" + b"\0" * 7 + b"[]"):
        plain.write_bytes(junk)
        with pytest.raises(ConfigError, match="not a version file"):
            publisher.found_file(plain, at=0.0)


def test_a_start_file_cut_short_makes_no_version(tmp_path: Path) -> None:
    save_init(network(), tmp_path / "init")
    (tmp_path / "init").write_bytes((tmp_path / "init").read_bytes()[:-50])
    fleet = Fleet(tmp_path / "journal", LAYOUT, vector(LAYOUT, 1))
    with pytest.raises(ConfigError, match=r"init is cut short: \d+ bytes of \d+"):
        fleet.publisher.found_file(tmp_path / "init", at=0.0)
    assert fleet.journal.versions() == ()
    assert fleet.files.open_now == set()


def test_a_module_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.bias, torch.inf)
    with pytest.raises(ConfigError, match="cannot start from this module"):
        save_init(module, tmp_path / "init")


def test_weights_that_would_not_be_finite_are_not_published(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LAYOUT, torch.full((LAYOUT.elements,), -3e38))
    fleet.found()
    with pytest.raises(ConfigError, match=r"version 1 would hold weights that are not finite .*limits\.max_norm"):
        fleet.merge([fleet.delta("a", torch.full((LAYOUT.elements,), 3e38), 1)], 1)
    assert [v.number for v in fleet.journal.versions()] == [0]


def test_first_weights_that_the_published_codec_cannot_hold_are_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LAYOUT, torch.full((LAYOUT.elements,), 3.4e38), publish="bfloat16")  # beyond bfloat16
    with pytest.raises(ConfigError, match=r"version 0 would hold weights that are not finite .*another model"):
        fleet.found()


def test_a_layout_without_buffers(tmp_path: Path, published: str) -> None:
    layout = Layout.of([("w", (1537,))])
    fleet = Fleet(tmp_path, layout, vector(layout, 1), publish=published)
    fleet.found()
    fleet.merge([fleet.delta("a", fleet.start, 1, tier=Tier.SITE)], 1)
    assert torch.equal(fleet.exact(1), torch.zeros(1537))
    assert len(fleet.payload(1)) == publish_module.codecs.get(published).encoded_bytes(1537)
