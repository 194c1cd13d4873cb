"""From hard samples to a proxy set, and labels that came late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.soft_tasks import Corners, cloud, proxy_set, soft_config
from torch.utils.data import DataLoader

from fleetddp.common import codecs
from fleetddp.common.clock import VirtualClock
from fleetddp.common.errors import ConfigError
from fleetddp.common.inference_config import HardSamplesConfig
from fleetddp.common.knowledge import Knowledge
from fleetddp.common.update import Tier, UpdateId
from fleetddp.edge.closed_loop import proxy_from, with_labelled
from fleetddp.edge.reservoir import HardSamples, Reservoir, digest_of

KEPT = HardSamplesConfig(consent=True, retention_hours=1.0, label_share=1.0, label_after_s=60.0)
POINTS, CLASSES = cloud(12, 5)


def kept(folder: Path, points: torch.Tensor, *labelled: int) -> HardSamples:
    """A node's reservoir of these points; of some the class became known after a minute."""
    clock = VirtualClock()
    with Reservoir(folder, KEPT, clock=clock) as reservoir:
        reservoir.add(points, torch.ones(len(points)))
        clock.advance(61.0)
        known = {digest_of(points[i]): int(CLASSES[i]) for i in labelled}
        reservoir.ask(lambda sample: known.get(digest_of(sample)))
        return reservoir.snapshot()


def test_the_same_samples_are_the_same_set_whoever_makes_it(tmp_path: Path) -> None:
    first, second = kept(tmp_path / "1", POINTS[:8], 0), kept(tmp_path / "2", POINTS[6:])
    proxy = proxy_from([first, second], name="hard-1", classes=4)
    assert proxy.digest == proxy_from([second, first], name="hard-1", classes=4).digest
    assert len(proxy) == 12
    assert torch.equal(proxy.items.sort(0).values, POINTS.sort(0).values)


def test_no_samples_or_unlike_ones_are_no_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hard samples"):
        proxy_from([HardSamples(())], name="hard-1", classes=4)
    others = kept(tmp_path / "2", torch.randn(2, 5))
    with pytest.raises(ConfigError, match="different shapes"):
        proxy_from([kept(tmp_path / "1", POINTS), others], name="hard-1", classes=4)


def test_labelled_ones_join_the_data_and_are_said(tmp_path: Path) -> None:
    samples = kept(tmp_path / "1", POINTS, 2, 7)
    task = Corners({"e1": (0, 1)})
    wider = with_labelled(task, samples)
    own = task.data("e1", 0, 1)
    rows = [row for batch in DataLoader(wider.data("e1", 0, 1), 16) for row in zip(*batch, strict=True)]
    assert len(rows) == len(own) + 2  # type: ignore[arg-type]
    added = {digest_of(point): int(label) for point, label in rows[len(own) :]}  # type: ignore[arg-type]
    assert added == {digest_of(POINTS[i]): int(CLASSES[i]) for i in (2, 7)}
    assert len(with_labelled(task, HardSamples(())).data("e1", 0, 1)) == len(own)  # type: ignore[arg-type]
    proxy = proxy_from([samples], name="hard-1", classes=4)
    classes = wider.known_classes(proxy)  # type: ignore[attr-defined]
    assert {digest_of(proxy[i]): int(classes[i]) for i in torch.nonzero(classes >= 0).flatten().tolist()} == added
    assert wider.evaluate(task.model())["accuracy"] == task.evaluate(task.model())["accuracy"]


def test_what_is_known_for_certain_outweighs_every_opinion(tmp_path: Path) -> None:
    """It is said with weight ``known_weight``, and learnt whatever the others say."""
    proxy = proxy_set(Corners({}))
    config = soft_config(tmp_path, proxy, distill={"known_weight": 8.0})
    edge = Knowledge(proxy, config, Tier.EDGE)
    classes = torch.full((40,), -1)
    classes[3] = 2
    edge.know(classes)
    edge.adopt(0, torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0]]).repeat(40, 1))
    opinion = edge.rows_of(20 * torch.eye(4)[torch.zeros(10, dtype=torch.int64)])
    payload = edge.say(UpdateId("e1", 1, 1), opinion).payload
    said = codecs.get("prob16:4").decode(torch.frombuffer(payload, dtype=torch.uint8), 50).view(10, 5)
    assert said[3].tolist() == [0.0, 0.0, 8.0, 0.0, 8.0]
    assert torch.allclose(said[2], opinion[2], rtol=1e-3, atol=1e-6)
    right = 30 * torch.eye(4)[torch.tensor([2, 0])]
    assert float(edge.loss(right, torch.tensor([3, 0]))) == pytest.approx(0.0, abs=1e-3)
    for wrong in (torch.full((39,), -1), torch.full((40,), 4)):
        with pytest.raises(ConfigError, match="known classes"):
            edge.know(wrong)
