"""Edge models of more than one part: replicas whose answers are averaged, and a model cut into stages.

Each part is a predictor: a module on this device, or a ``RemotePredictor`` of another node that serves one (``ServerThread``).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fleetddp.common.errors import ConfigError, FleetError, Unreachable
from fleetddp.common.predictor import Predictor


class Replicated:
    """Asks all replicas at once and averages the probabilities of those that answer; of fewer than ``at_least``: ``Unreachable``.

    The logits it returns have the mean of the replicas' probabilities as their softmax, and the mean of their energies as their
    energy, so that every rule of hardness means the same as for one model.
    """

    def __init__(self, replicas: Sequence[Predictor], *, at_least: int = 1) -> None:
        if not 1 <= at_least <= len(replicas):
            raise ConfigError(f"at_least is {at_least} of {len(replicas)} replicas")
        self._replicas, self._at_least = tuple(replicas), at_least
        self._threads = ThreadPoolExecutor(4 * len(replicas), "fleetddp-replicas")

    def __call__(self, inputs: Tensor) -> Tensor:
        """f32[n, ...] to f32[n, classes]."""
        asked = [self._threads.submit(replica, inputs) for replica in self._replicas]
        answers, silent = [], []
        for answer in asked:
            try:
                answers.append(answer.result())
            except FleetError as error:
                silent.append(str(error))
        if len(answers) < self._at_least:
            raise Unreachable(f"{len(answers)} of {len(asked)} replicas answered, {self._at_least} are due: {'; '.join(silent)}")
        if len(answers) == 1:
            return answers[0]
        stacked = torch.stack(answers)
        probabilities = stacked.softmax(2).mean(0)
        return probabilities.clamp_min(torch.finfo(torch.float32).tiny).log() + stacked.logsumexp(2).mean(0).unsqueeze(1)

    def close(self) -> None:
        """End the threads; the replicas stay the caller's."""
        self._threads.shutdown()


class Staged:
    """A model cut in two: what ``first`` gives goes through ``second``. ``model[:k]`` and ``model[k:]`` cut an ``nn.Sequential``.

    Between two nodes, cut where little has to travel: only float32 does, at most ``TENSOR_BYTES`` at once.
    """

    def __init__(self, first: Predictor, second: Predictor) -> None:
        self._first, self._second = first, second

    def __call__(self, inputs: Tensor) -> Tensor:
        """f32[n, ...] to f32[n, classes]."""
        return self._second(self._first(inputs))
