"""Models in service over real gRPC: batches, swaps, deadlines, refusals, and a fleet whose versions are served as they come."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.certificates import make_ca, security
from helpers.fleet import fleet_config, free_port, on_port, running, write
from helpers.processes import PATIENCE_S, commands, eventually
from helpers.proxy import Proxy
from helpers.serving import ConstantTask, fleet_sections, publish
from helpers.tasks import LineTask
from safetensors.torch import load_file
from torch import Tensor, nn

from fleetddp.cloud.cli import main
from fleetddp.cloud.export import export_version
from fleetddp.cloud.inference import Inference
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import ConfigError, Late, Reason, Refused, Unreachable
from fleetddp.common.events import Join
from fleetddp.common.inference_config import ServeConfig
from fleetddp.common.predictor import Gate, ModulePredictor, Served, accuracy
from fleetddp.common.publish import save_init
from fleetddp.common.transport.follower import supply
from fleetddp.common.transport.inference_client import RemotePredictor
from fleetddp.common.transport.inference_server import ServerThread
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.update import Tier
from fleetddp.edge.cascade import By, Cascade, Why
from fleetddp.edge.ensemble import Replicated, Staged
from fleetddp.edge.hardness import margin

PLAIN = SecurityConfig()


def of_version(version: int) -> Callable[[Tensor], Tensor]:
    """Answers a sample with its first value and the version."""
    return lambda inputs: torch.stack([inputs[:, 0], torch.full((len(inputs),), float(version))], 1)


@contextmanager
def serving(served: Served, **options: Any) -> Iterator[RemotePredictor]:
    config = ServeConfig(address="127.0.0.1:0", **options)
    with ServerThread(served, config, PLAIN, allow=("pi*",)) as server:
        remote = RemotePredictor(f"127.0.0.1:{server.port}", PLAIN, node="pi", timeout_s=PATIENCE_S)
        try:
            yield remote
        finally:
            remote.close()


def in_service(predictor: Callable[[Tensor], Tensor], version: int = 1) -> Served:
    served = Served()
    served.offer(predictor, version)
    return served


class Gated:
    """A model that answers when it may; ``begun`` has the size of each batch."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), []  # type: ignore[var-annotated]
        self._started = threading.Condition()

    def __call__(self, inputs: Tensor) -> Tensor:
        with self._started:
            self.begun.append(len(inputs))
            self._started.notify_all()
        assert self.go.wait(PATIENCE_S)
        if bool((inputs < 0).any()):
            raise ValueError("a negative sample")
        return inputs

    def wait(self, batches: int = 1) -> None:
        with self._started:
            assert self._started.wait_for(lambda: len(self.begun) >= batches, PATIENCE_S)


def test_answers_come_back_in_order() -> None:
    with serving(in_service(of_version(3), 3)) as remote:
        outputs, versions = remote.predict(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), PATIENCE_S)
        assert outputs.tolist() == [[1.0, 3.0], [2.0, 3.0]]
        assert versions == (3, 3)
        assert remote(torch.tensor([[5.0, 0.0]])).tolist() == [[5.0, 3.0]]
        assert remote.serving() == {"version": 3, "refused_version": -1, "samples": 3, "batches": 2, "shed": 0, "waiting": 0}


def test_what_does_not_fit_one_request_goes_in_several() -> None:
    inputs = torch.arange(10_000.0).unsqueeze(1).expand(-1, 2)
    with serving(in_service(of_version(3)), max_queue=10_000) as remote:
        outputs, versions = remote.predict(inputs, PATIENCE_S)
        assert torch.equal(outputs[:, 0], inputs[:, 0])
        assert len(versions) == 10_000


def test_requests_that_wait_are_one_batch() -> None:
    model = Gated()
    with serving(in_service(model), max_batch=64) as remote, ThreadPoolExecutor(9) as threads:
        first = threads.submit(remote, torch.zeros(1, 2))
        model.wait()
        rest = [threads.submit(remote, torch.full((2, 2), float(i))) for i in range(8)]
        eventually(lambda: remote.serving()["waiting"] == 16, "all wait")
        model.go.set()
        assert [r.result().tolist() for r in rest] == [[[float(i)] * 2] * 2 for i in range(8)]
        assert first.result().tolist() == [[0.0, 0.0]]
        assert model.begun == [1, 16]


def test_a_bad_request_spoils_no_other_of_its_batch() -> None:
    model = Gated()
    with serving(in_service(model)) as remote, ThreadPoolExecutor(9) as threads:
        blocking = threads.submit(remote, torch.zeros(1, 2))
        model.wait()
        good, bad, also = (threads.submit(remote, torch.full((1, 2), value)) for value in (1.0, -1.0, 2.0))
        other = threads.submit(remote, torch.ones(1, 3))  # of another shape: a batch of its own
        eventually(lambda: remote.serving()["waiting"] == 4, "all wait")
        model.go.set()
        assert (good.result().tolist(), also.result().tolist()) == ([[1.0, 1.0]], [[2.0, 2.0]])
        with pytest.raises(Unreachable, match="INTERNAL: the model failed on this: ValueError"):
            bad.result()
        assert other.result().tolist() == [[1.0, 1.0, 1.0]]
        assert blocking.result().tolist() == [[0.0, 0.0]]


def test_one_who_waits_no_longer_is_not_computed_for() -> None:
    model = Gated()
    with serving(in_service(model)) as remote, ThreadPoolExecutor(9) as threads:
        blocking = threads.submit(remote, torch.zeros(1, 2))
        model.wait()
        with pytest.raises(Late, match="no answer in time"):
            remote.predict(torch.ones(1, 2), 0.1)
        after = threads.submit(remote, torch.full((1, 2), 2.0))
        eventually(lambda: remote.serving()["waiting"] >= 1, "it waits")
        model.go.set()
        assert after.result().tolist() == [[2.0, 2.0]]
        assert blocking.result().tolist() == [[0.0, 0.0]]
        assert model.begun == [1, 1]
        assert remote.serving()["samples"] == 2


def test_an_overloaded_server_says_so_at_once() -> None:
    model = Gated()
    with serving(in_service(model), max_queue=2) as remote, ThreadPoolExecutor(9) as threads:
        asked = [threads.submit(remote, torch.zeros(1, 2))]
        model.wait()
        asked += [threads.submit(remote, torch.zeros(1, 2)) for _ in range(2)]
        eventually(lambda: remote.serving()["waiting"] == 2, "the queue is full")
        with pytest.raises(Refused, match="2 samples wait already; at most 2 may") as refused:
            remote(torch.zeros(1, 2))
        assert refused.value.reason is Reason.OVERLOADED
        cascade = Cascade(of_version(0), remote, hard=lambda outputs: torch.ones(len(outputs)), threshold=0.0)
        assert [(a.by, a.why) for a in cascade(torch.zeros(2, 2))] == [(By.EDGE, Why.REFUSED)] * 2
        model.go.set()
        assert [a.result().tolist() for a in asked] == [[[0.0, 0.0]]] * 3
        assert remote.serving()["shed"] == 2


def test_a_swap_drops_no_request() -> None:
    """Eight threads ask without a pause while versions come; each answer is whole, and right for the version it names."""
    served, over, wrong, counts = in_service(of_version(1)), threading.Event(), [], []  # type: ignore[var-annotated]
    with serving(served, max_batch=8) as remote:

        def ask(mark: float) -> None:
            count, newest = 0, 0
            while not over.is_set():
                outputs, versions = remote.predict(torch.full((3, 2), mark), PATIENCE_S)
                if outputs.tolist() != [[mark, float(versions[0])]] * 3 or len(set(versions)) > 1 or versions[0] < newest:
                    wrong.append((outputs, versions))
                newest, count = versions[0], count + 1
            counts.append(count)

        with ThreadPoolExecutor(8) as threads:
            asking = [threads.submit(ask, float(mark)) for mark in range(8)]
            for version in range(2, 40):
                before = remote.serving()["samples"]
                served.offer(of_version(version), version)
                eventually(lambda before=before: remote.serving()["samples"] > before + 24, "it goes on")
            over.set()
            for thread in asking:
                thread.result()  # raises what was refused or dropped
        assert wrong == []
        assert remote.serving() | {"batches": 0} == {
            "version": 39, "refused_version": -1, "samples": 3 * sum(counts), "batches": 0, "shed": 0, "waiting": 0,
        }  # fmt: skip


def test_before_there_is_a_version() -> None:
    with serving(Served()) as remote, pytest.raises(Refused) as refused:
        remote(torch.zeros(1, 2))
    assert refused.value.reason is Reason.NO_VERSION


def test_what_a_sender_may_not_send() -> None:
    with serving(in_service(of_version(1))) as remote:
        with pytest.raises(Refused, match="NOT_FINITE"):
            remote(torch.tensor([[float("nan"), 0.0]]))
        with pytest.raises(Refused, match="TOO_LARGE: a sample"):
            remote(torch.zeros(1, 300_000))
        assert remote(torch.zeros(1, 2)).tolist() == [[0.0, 1.0]]


def test_an_answer_that_does_not_fit_a_message() -> None:
    with (
        serving(in_service(lambda inputs: torch.zeros(len(inputs), 300_000))) as remote,
        pytest.raises(Refused, match="TOO_LARGE"),
    ):
        remote(torch.zeros(1, 2))


def test_those_who_are_not_allowed() -> None:
    with serving(in_service(of_version(1))) as remote:
        remote._node = "stranger"
        with pytest.raises(Refused, match=r"'stranger' matches no pattern of members\.allow"):
            remote(torch.zeros(1, 2))


def test_nobody_there() -> None:
    remote = RemotePredictor(f"127.0.0.1:{free_port()}", PLAIN, node="pi")
    with pytest.raises(Unreachable, match="UNAVAILABLE"):
        remote(torch.zeros(1, 2))
    remote.close()
    with pytest.raises(Unreachable, match="the connection was closed"):
        remote(torch.zeros(1, 2))


def test_a_connection_that_fell_silent_is_dialled_anew() -> None:
    with ServerThread(in_service(of_version(1)), ServeConfig(address="127.0.0.1:0"), PLAIN) as server, ExitStack() as stack:
        proxy = Proxy(server.port)
        stack.callback(proxy.close)
        remote = RemotePredictor(proxy.address, PLAIN, node="pi", timeout_s=PATIENCE_S, redial_s=0.0)
        stack.callback(remote.close)
        remote(torch.zeros(1, 2))
        proxy.freeze()
        with pytest.raises(Late):
            remote.predict(torch.zeros(1, 2), 0.2)
        assert remote(torch.zeros(1, 2)).tolist() == [[0.0, 1.0]]
        assert proxy.connections == 2


def test_an_address_that_is_taken() -> None:
    with serving(in_service(of_version(1))) as remote, pytest.raises(ConfigError, match="cannot listen on"):
        ServerThread(Served(), ServeConfig(address=remote.address), PLAIN)
    with pytest.raises(ConfigError, match="is not on this machine"):
        ServerThread(Served(), ServeConfig(address="0.0.0.0:0"), PLAIN)


def test_two_stages_and_two_replicas_on_two_nodes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    whole, inputs = ModulePredictor(model), torch.randn(5, 3)
    with ExitStack() as stack:
        tail, first, second = (stack.enter_context(serving(in_service(ModulePredictor(m)))) for m in (model[1:], model, model))
        torch.testing.assert_close(Staged(ModulePredictor(model[:1]), tail)(inputs), whole(inputs))
        both = Replicated([first, second])
        stack.callback(both.close)
        cascade = Cascade(both, None, hard=lambda outputs: torch.zeros(len(outputs)), threshold=1.0)
        answers = torch.stack([answer.outputs for answer in cascade(inputs)])
        torch.testing.assert_close(answers, whole(inputs), atol=1e-5, rtol=1e-5)
        first.close()  # one node is gone, the pair goes on
        assert [answer.why for answer in cascade(inputs)] == [Why.EASY] * 5


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_mutual_tls(tmp_path: Path) -> None:
    ca = make_ca(tmp_path, "pi", "other", server="cloud-1")
    config = ServeConfig(address="127.0.0.1:0")
    with ServerThread(in_service(of_version(1)), config, security(ca, "cloud-1")) as server, ExitStack() as stack:

        def dial(certificate: SecurityConfig, node: str) -> RemotePredictor:
            remote = RemotePredictor(f"localhost:{server.port}", certificate, node=node, timeout_s=PATIENCE_S)
            stack.callback(remote.close)
            return remote

        assert dial(security(ca, "pi"), "pi")(torch.zeros(1, 2)).tolist() == [[0.0, 1.0]]
        assert dial(security(ca, "cloud-1"), "cloud-1")(torch.zeros(1, 2)).tolist() == [[0.0, 1.0]]  # it dials, too
        with pytest.raises(Refused, match="the certificate is of 'other'; the call claims to be 'pi'"):
            dial(security(ca, "other"), "pi")(torch.zeros(1, 2))
        with pytest.raises(Unreachable):
            dial(PLAIN, "pi")(torch.zeros(1, 2))


# ---- a fleet's versions -----------------------------------------------------------------------------------------------------


def join(address: str) -> Uplink:
    uplink = Uplink(address, PLAIN, node="pi")
    uplink.join(Join(node="pi", tier=Tier.EDGE, incarnation=1))
    return uplink


def test_versions_are_served_as_they_are_published_unless_they_are_worse(tmp_path: Path) -> None:
    sections = fleet_sections(tmp_path, gate={"metric": "accuracy", "tolerance": 0.05})
    with running(fleet_config(tmp_path, **sections)) as coordinator, ExitStack() as stack:
        config = on_port(coordinator.config, coordinator.coordinator.port)
        inference = Inference(config, ConstantTask(), name="cloud-1")
        stack.callback(inference.close)
        remote = RemotePredictor(f"127.0.0.1:{inference.port}", PLAIN, node="pi", timeout_s=PATIENCE_S)
        stack.callback(remote.close)
        served = inference.served
        eventually(lambda: served.version == 0, "version 0 is in service")
        assert remote(torch.zeros(1, 3)).tolist() == [[0.0, 0.0]]
        pi = join(coordinator.address)
        stack.callback(pi.close)
        publish(pi, 0, (10.0, 1.0))
        eventually(lambda: served.version == 1, "version 1 is in service")
        assert remote.predict(torch.zeros(1, 3), PATIENCE_S).versions == (1,)
        publish(pi, 1, (-6.0, 0.0))  # 0.04 where 0.10 was reached
        eventually(lambda: served.refused_version == 2, "version 2 is kept out")
        assert remote(torch.zeros(1, 3)).tolist() == [[10.0, 1.0]]
        publish(pi, 2, (2.0, 0.0))
        eventually(lambda: served.version == 3, "version 3 is in service")
        assert remote(torch.zeros(1, 3)).tolist() == [[6.0, 1.0]]
        assert [m["node"] for m in coordinator.status()["members"]] == ["pi"]  # no window waits for who serves


def test_an_edge_takes_no_worse_model_into_service(tmp_path: Path) -> None:
    held_back = torch.zeros(4, 3), torch.tensor([0, 0, 0, 1])
    with running(fleet_config(tmp_path, **fleet_sections(tmp_path))) as coordinator, ExitStack() as stack:
        kept = tmp_path / "in-service.safetensors"
        served = Served(Gate(accuracy(*held_back)), kept=kept)
        parent = Uplink(coordinator.address, PLAIN, node="watcher")
        follower = supply(served, ConstantTask(), parent, node="watcher")
        stack.callback(follower.close)
        follower.start()
        cascade = Cascade(served, None, hard=margin, threshold=1.0)
        eventually(lambda: served.version == 0, "version 0 is in service")
        pi = join(coordinator.address)
        stack.callback(pi.close)
        publish(pi, 0, (-1.0, 1.0))  # class 1 for all: right on a quarter
        eventually(lambda: served.refused_version == 1, "version 1 is kept out")
        assert [(a.label, a.version) for a in cascade(torch.zeros(1, 3))] == [(0, 0)]
        publish(pi, 1, (3.0, 0.0))
        eventually(lambda: served.version == 2, "version 2 is in service")
        assert [(a.label, a.version) for a in cascade(torch.zeros(1, 3))] == [(0, 2)]
        publish(pi, 2, (-5.0, 1.0))
        eventually(lambda: served.refused_version == 3, "version 3 is kept out")
        follower.close()
        again = Served(Gate(accuracy(*held_back)), kept=kept)  # the device was restarted
        parent = Uplink(coordinator.address, PLAIN, node="watcher")
        follower = supply(again, ConstantTask(), parent, node="watcher")
        stack.callback(follower.close)
        cascade = Cascade(again, None, hard=margin, threshold=1.0)
        assert [(a.label, a.version) for a in cascade(torch.zeros(1, 3))] == [(0, 2)]  # before it has asked anybody
        follower.start()
        eventually(lambda: again.refused_version == 3, "version 3 is kept out again")
        assert [(a.label, a.version) for a in cascade(torch.zeros(1, 3))] == [(0, 2)]


def test_the_version_in_service_stays_when_the_coordinator_is_away(tmp_path: Path) -> None:
    config = on_port(fleet_config(tmp_path, **fleet_sections(tmp_path)), free_port())
    with ExitStack() as stack:
        with running(config):
            inference = Inference(config, ConstantTask(), name="cloud-1")
            stack.callback(inference.close)
            eventually(lambda: inference.served.version == 0, "version 0 is in service")
        remote = RemotePredictor(f"127.0.0.1:{inference.port}", PLAIN, node="pi", timeout_s=PATIENCE_S)
        stack.callback(remote.close)
        assert remote(torch.zeros(1, 3)).tolist() == [[0.0, 0.0]]
        with running(config) as coordinator:
            pi = join(coordinator.address)
            stack.callback(pi.close)
            publish(pi, 0, (5.0, 0.0))
            eventually(lambda: inference.served.version == 1, "version 1 is in service")
        assert inference.failure is None


def test_one_of_several_tracks_is_served_and_exported(tmp_path: Path) -> None:
    sections = fleet_sections(tmp_path)
    big = {key: sections.pop(key) for key in ("start", "task")}
    save_init(LineTask().model(), tmp_path / "small.safetensors")
    small = {
        "start": {"bootstrap": "file", "file": str(tmp_path / "small.safetensors")},
        "task": {"target": "helpers.tasks:LineTask"},
    }
    sections["serve"]["track"] = "big"
    with running(fleet_config(tmp_path, tracks={"big": big, "small": small}, **sections)) as coordinator, ExitStack() as stack:
        config = on_port(coordinator.config, coordinator.coordinator.port).for_track("big")
        inference = Inference(config, ConstantTask(), name="cloud-1")
        stack.callback(inference.close)
        eventually(lambda: inference.served.version == 0, "version 0 is in service")
        done = export_version(config, "safetensors", tmp_path / "m", version=-1, node="pi", from_journal=False)
    assert (done.version, load_file(done.path)["w"].tolist()) == (0, [0.0, 0.0])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_server_is_a_client_of_the_coordinator_by_the_same_certificate(tmp_path: Path) -> None:
    ca = make_ca(tmp_path / "certs", "pi", server="cloud-1")

    def files(name: str) -> dict[str, str]:
        return {key: str(path) for key, path in security(ca, name).model_dump(exclude={"insecure"}).items()}

    sections = fleet_sections(tmp_path)
    with running(fleet_config(tmp_path, security=files("coordinator"), **sections)) as coordinator, ExitStack() as stack:
        config = on_port(coordinator.config, coordinator.coordinator.port)
        mine = config.model_copy(update={"security": security(ca, "cloud-1")})
        inference = Inference(mine, ConstantTask(), name="cloud-1")
        stack.callback(inference.close)
        eventually(lambda: inference.served.version == 0, "version 0 is in service")
        remote = RemotePredictor(f"localhost:{inference.port}", security(ca, "pi"), node="pi", timeout_s=PATIENCE_S)
        stack.callback(remote.close)
        assert remote(torch.zeros(1, 3)).tolist() == [[0.0, 0.0]]


def test_another_model_than_the_fleets_is_a_failure(tmp_path: Path) -> None:
    class Other(ConstantTask):
        def model(self) -> nn.Module:
            return nn.Linear(3, 2)

    with running(fleet_config(tmp_path, **fleet_sections(tmp_path))) as coordinator:
        inference = Inference(on_port(coordinator.config, coordinator.coordinator.port), Other(), name="cloud-1")
        eventually(lambda: inference.failure is not None, "it fails")
        inference.close()
    assert "'w'" in str(inference.failure)


def test_kill_of_the_cloud(tmp_path: Path) -> None:
    """fleetddp serve, killed during a stream of requests and started again: every request is answered."""
    sections = fleet_sections(tmp_path)
    sections["serve"]["address"] = f"127.0.0.1:{free_port()}"
    sections["cascade"] = {"deadline_s": 5.0, "pause_s": 0.01, "pause_cap_s": 0.05}
    with ExitStack() as stack:
        coordinator = stack.enter_context(running(fleet_config(tmp_path, **sections)))
        config = on_port(coordinator.config, coordinator.coordinator.port)
        command, path = stack.enter_context(commands()), write(config, tmp_path)
        serve = command("serve", path, "--name", "cloud-1")
        serve.wait_for("version 0 is in service")
        cascade = Cascade.of_fleet(config, "pi", of_version(9), threshold=-1.0)
        stack.callback(cascade.close)
        answers, enough = [], threading.Event()  # type: ignore[var-annotated]

        def stream() -> None:
            while not enough.is_set():
                answers.extend(cascade(torch.ones(2, 3)))

        with ThreadPoolExecutor(1) as threads:
            streaming = threads.submit(stream)
            eventually(lambda: len(answers) > 20, "the stream flows")
            assert {a.by for a in answers} == {By.CLOUD}
            assert serve.end(signal.SIGKILL) == -signal.SIGKILL
            killed = len(answers)
            eventually(lambda: len(answers) > killed + 20 and answers[-1].by is By.EDGE, "the edge answers alone")
            serve = command("serve", path, "--name", "cloud-1")
            eventually(lambda: answers[-1].by is By.CLOUD or streaming.done(), "the cloud answers again")
            enough.set()
            streaming.result()  # not one request was without its answers
        assert {a.why for a in answers} <= {Why.HARD, Why.AWAY, Why.LATE, Why.REFUSED}
        assert serve.end(signal.SIGTERM) == 0


def test_exports_of_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From the coordinator while it runs, and from its journal when it has ended."""

    def export(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fleetddp", "export", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, capsys.readouterr().err
        return capsys.readouterr().out

    zero, one = tmp_path / "out" / "zero.safetensors", tmp_path / "one.safetensors"
    with running(fleet_config(tmp_path, **fleet_sections(tmp_path))) as coordinator:
        path = write(on_port(coordinator.config, coordinator.coordinator.port), tmp_path)
        assert f"{zero}: version 0" in export(path, "--out", str(zero)).replace("\n", "")
        pi = join(coordinator.address)
        publish(pi, 0, (5.0, 3.0))
        eventually(lambda: coordinator.status()["version"] == 1, "version 1 is published")
        pi.close()
    assert "version 1" in export(path, "--journal", "--out", str(one))
    assert [load_file(file)["w"].tolist() for file in (zero, one)] == [[0.0, 0.0], [5.0, 3.0]]
