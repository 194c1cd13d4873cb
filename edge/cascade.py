"""The edge model answers; what it finds hard goes to the cloud's model. Without the cloud, the edge's answer stands.

    kept = Path("/var/lib/fleetddp/in-service.safetensors")  # the model in service, over restarts of the device
    served = Served(Gate(accuracy(images, labels)), kept=kept)  # no worse model is taken into service (common/predictor.py)
    supply(served, task, parent, node="pi").start()  # each version, as it is published (common/transport/follower.py)
    threshold = calibrate(config.cascade, served, images).threshold
    cascade = Cascade.of_fleet(config, "pi", served, threshold, on_hard=reservoir.add)
    for answer in cascade(inputs): answer.label, answer.by, answer.why

Every sample gets an answer, whatever becomes of the cloud, within the edge model's time and the deadline; only when the edge
model itself cannot answer (its nodes are away) and the cloud cannot either, the edge's error is raised.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import ConfigError, FleetError, Late, Refused
from fleetddp.common.inference_config import CascadeConfig
from fleetddp.common.predictor import Prediction, Predictor, Served
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.transport.inference_client import RemotePredictor
from fleetddp.common.update import NO_VERSION
from fleetddp.edge.hardness import RULES, Calibration, Rule, for_accuracy, for_rate

DEFAULT_RATE = 0.2  # of samples that go to the cloud, where the fleet file does not say

log = logging.getLogger(__name__)


class By(str, Enum):
    """Who gave an answer."""

    EDGE = "edge"
    CLOUD = "cloud"


class Why(str, Enum):
    """Why it was this one."""

    EASY = "easy"  # the edge was sure
    HARD = "hard"  # the edge was not, and the cloud answered
    NO_EDGE = "no_edge"  # the edge's model could not answer (its nodes are away), the cloud did
    LATE = "late"  # hard, but no answer came by the deadline
    AWAY = "away"  # hard, but the cloud could not be reached, or was found away a moment ago
    REFUSED = "refused"  # hard, but the cloud said no (overloaded, no version yet), or a moment ago
    UNUSABLE = "unusable"  # hard, but the cloud cannot take this sample, or its answer has other classes or is not finite
    ALONE = "alone"  # hard, but there is no cloud


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for one sample."""

    outputs: Tensor  # f32[classes], logits
    by: By
    why: Why
    hardness: float  # of the edge's answer; infinite where there is none
    version: int  # of the model that answered; -1 where it has none

    @property
    def label(self) -> int:
        """The most probable class."""
        return int(self.outputs.argmax())


class Cloud(Protocol):
    """The model that is asked about hard samples, e.g. a ``RemotePredictor``. It keeps to the time it is given."""

    def predict(self, inputs: Tensor, timeout_s: float) -> Prediction:
        """Answers for f32[n, ...]; raises ``FleetError``: ``Late``, ``Unreachable``, ``Refused``."""
        ...


# Samples f32[k, ...], their hardness f32[k], and the cloud's answers f32[k, classes], if it gave any.
HardSink = Callable[[Tensor, Tensor, "Tensor | None"], object]


class Cascade:
    """See the module. ``hard`` and ``threshold`` say which samples are hard (hardness.py calibrates the threshold).

    After the cloud was late, away or refused, hard samples are not sent there for a while (``pause``: growing, jittered), so that
    not each of them waits for the deadline; then one request finds out how things stand while the others still do without.
    ``on_hard`` gets the hard samples, for the closed loop. Safe to use from several threads; ``clock`` tells seconds.
    """

    def __init__(
        self,
        edge: Predictor,
        cloud: Cloud | None,
        *,
        hard: Rule,
        threshold: float,
        deadline_s: float = 0.2,
        pause: Backoff | None = None,
        on_hard: HardSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._edge, self._cloud = edge, cloud
        self._hard, self.threshold = hard, threshold
        self._deadline_s, self._on_hard = deadline_s, on_hard
        self._pause = _Pause(pause or Backoff(random.Random(), first_s=1.0, cap_s=30.0), clock)
        self._lock = threading.Lock()
        self._counts: Counter[tuple[By, Why]] = Counter()

    @classmethod
    def of_fleet(
        cls, config: FleetConfig, node: str, edge: Predictor, threshold: float, *, on_hard: HardSink | None = None
    ) -> Cascade:
        """A cascade as the fleet file describes it, before the model that ``fleetddp serve`` serves; ``close`` it."""
        cascade = config.cascade
        return cls(
            edge,
            RemotePredictor(config.serve.address, config.security, node=node, timeout_s=cascade.deadline_s),
            hard=RULES[cascade.rule],
            threshold=threshold,
            deadline_s=cascade.deadline_s,
            pause=Backoff(random.Random(), first_s=cascade.pause_s, cap_s=cascade.pause_cap_s),
            on_hard=on_hard,
        )

    def close(self) -> None:
        """Drop the connection to the cloud, if there is one."""
        if isinstance(self._cloud, RemotePredictor):
            self._cloud.close()

    @property
    def counts(self) -> dict[tuple[By, Why], int]:
        """How many answers were given by whom and why."""
        with self._lock:
            return dict(self._counts)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> list[Answer]:
        """An answer for each of f32[n, ...]."""
        if not len(inputs):
            return []
        answers, hardness, failure = self._ask_edge(inputs)
        hard = hardness > self.threshold
        sendable = inputs.flatten(1).isfinite().all(1) if inputs.dim() > 1 else inputs.isfinite()
        for i in (hard & ~sendable).nonzero().flatten().tolist():
            answers[i] = _stands(answers[i], Why.UNUSABLE)
        rows = (hard & sendable).nonzero().flatten()
        if len(rows):
            classes = None if failure is not None else len(answers[0].outputs)
            found, why = self._ask_cloud(inputs[rows], classes, needed=failure is not None)
            for k, i in enumerate(rows.tolist()):
                if found is None:
                    answers[i] = _stands(answers[i], why)
                else:
                    answers[i] = Answer(found.outputs[k], By.CLOUD, why, float(hardness[i]), found.versions[k])
            self._tell(inputs[rows], hardness[rows], found)
        if failure is not None and any(answer.by is By.EDGE for answer in answers):
            raise failure
        with self._lock:
            self._counts.update((answer.by, answer.why) for answer in answers)
        return answers

    def _ask_edge(self, inputs: Tensor) -> tuple[list[Answer], Tensor, FleetError | None]:
        """The edge's answers and their hardness; those that are not finite are as hard as can be.

        Where something kept the edge from answering: answers of nothing, all as hard as can be, and what it was.
        """
        n = len(inputs)
        try:
            if isinstance(self._edge, Served):
                outputs, versions = self._edge.predict(inputs)
            else:
                outputs, versions = self._edge(inputs), (NO_VERSION,) * n
        except FleetError as error:
            nothing = Answer(torch.empty(0), By.EDGE, Why.NO_EDGE, math.inf, NO_VERSION)
            return [nothing] * n, torch.full((n,), math.inf), error
        hardness = self._hard(outputs)
        hardness = hardness.where(outputs.isfinite().all(1) & ~hardness.isnan(), math.inf)
        answers = [Answer(outputs[i], By.EDGE, Why.EASY, h, versions[i]) for i, h in enumerate(hardness.tolist())]
        return answers, hardness, None

    def _ask_cloud(self, inputs: Tensor, classes: int | None, *, needed: bool) -> tuple[Prediction | None, Why]:
        """The cloud's answers, or why there are none. A pause is not kept when there is nobody else to ask."""
        if self._cloud is None:
            return None, Why.ALONE
        if not self._pause.enter() and not needed:
            return None, self._pause.why
        try:
            found = self._cloud.predict(inputs, self._deadline_s)
        except FleetError as error:
            why = _why(error)
            if why is Why.UNUSABLE:  # this request's fault, or its answer's: the cloud is there
                self._pause.worked()
                log.warning("the cloud and the edge do not go together: %s", error)
            elif self._pause.failed(why):
                log.warning("the cloud does not answer, the edge goes on alone: %s", error)
            return None, why
        except BaseException:
            self._pause.failed(Why.AWAY)
            raise
        if self._pause.worked():
            log.info("the cloud answers again")
        right = found.outputs.dim() == 2 and len(found.outputs) == len(inputs) and classes in (None, found.outputs.shape[1])
        if not right or not bool(found.outputs.isfinite().all()):
            log.warning("the cloud answered %d samples with %s, not usable", len(inputs), tuple(found.outputs.shape))
            return None, Why.UNUSABLE
        return found, Why.NO_EDGE if needed else Why.HARD

    def _tell(self, samples: Tensor, hardness: Tensor, found: Prediction | None) -> None:
        """What becomes of hard samples later is no reason to fail now."""
        if self._on_hard is None:
            return
        try:
            self._on_hard(samples, hardness, None if found is None else found.outputs)
        except FleetError as error:
            log.warning("hard samples were not kept: %s", error)


def calibrate(
    config: CascadeConfig, edge: Predictor, inputs: Tensor, labels: Tensor | None = None, cloud: Predictor | None = None
) -> Calibration:
    """The threshold of the fleet file's aim, on held-back samples f32[n, ...]; an aim for accuracy needs labels int64[n], and the
    cloud's model. Raises ``ConfigError`` where the aim cannot be reached.
    """
    outputs = edge(inputs)
    hardness = RULES[config.rule](outputs)
    if config.accuracy is None:
        return for_rate(hardness, DEFAULT_RATE if config.offload_rate is None else config.offload_rate)
    if labels is None or cloud is None:
        raise ConfigError("cascade.accuracy is calibrated on labels and on the cloud model's answers: give both")
    return for_accuracy(hardness, outputs.argmax(1) == labels, cloud(inputs).argmax(1) == labels, config.accuracy)


def _stands(answer: Answer, why: Why) -> Answer:
    """The edge's answer, for another reason than that it was easy."""
    return replace(answer, why=why)


def _why(error: FleetError) -> Why:
    if isinstance(error, Late):
        return Why.LATE
    if isinstance(error, Refused):
        return Why.REFUSED if error.retry else Why.UNUSABLE
    return Why.AWAY


class _Pause:
    """Lets requests through to a cloud that answers; to one that does not, one at a time after each pause."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float]) -> None:
        self._backoff, self._clock = backoff, clock
        self._lock = threading.Lock()
        self._until: float | None = None  # the end of the pause; None: the cloud answers
        self._trying = False
        self.why = Why.AWAY  # of the last failure

    def enter(self) -> bool:
        """Whether to ask."""
        with self._lock:
            if self._until is None:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def failed(self, why: Why) -> bool:
        """Pause; whether the cloud had answered before. Of several requests that fail together only the first counts."""
        with self._lock:
            first = self._until is None
            if first or self._trying or self._clock() >= (self._until or 0.0):
                self._until = self._clock() + self._backoff.delay()
            self._trying = False
            self.why = why
            return first

    def worked(self) -> bool:
        """No pause; whether there was one."""
        with self._lock:
            paused = self._until is not None
            self._until, self._trying = None, False
            self._backoff.reset()
            return paused
