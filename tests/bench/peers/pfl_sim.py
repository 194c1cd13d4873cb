"""pfl-research (PyPI: pfl): its simulated backend and federated averaging. Run by torchrun in two processes."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import torch
import workload

torch.set_num_threads(1)
asyncio.set_event_loop(asyncio.new_event_loop())  # pfl asks for the current one where there is none

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402

NEVER = 10**9


class Classifier(torch.nn.Module):
    """What pfl expects of a model: its loss and its metrics."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net, self.criterion = net, torch.nn.CrossEntropyLoss()

    def loss(self, images: Any, labels: Any, eval: bool = False) -> Any:
        self.train(not eval)
        return self.criterion(self.net(images), labels)

    def metrics(self, images: Any, labels: Any, eval: bool = True) -> dict[str, Any]:
        self.eval()
        with torch.no_grad():
            return {"right": Weighted(int((self.net(images).argmax(1) == labels).sum()), len(labels))}


class Timer(TrainingProcessCallback):
    def __init__(self, laps: workload.Laps) -> None:
        self.laps = laps

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.laps.lap()
        return False, Metrics()


def main() -> None:
    laps, work = workload.Laps(), workload.load()
    net = workload.model(sys.argv[1])
    classifier = Classifier(net)
    model = PyTorchModel(
        classifier,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(classifier.parameters(), lr=1.0),
    )
    turns = iter([client for cohort in (work.cohorts[-1], *work.cohorts[: workload.ROUNDS]) for client in cohort])

    def user(client: int) -> Any:
        rows = work.rows[client]
        return PyTorchTensorDataset((work.images[rows], work.labels[rows]), user_id=str(client))

    def train(rounds: int, callbacks: list[Any]) -> None:
        users = FederatedDataset(user, lambda: next(turns), user_id_to_weight=None)
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=rounds, evaluation_frequency=NEVER, train_cohort_size=workload.COHORT, val_cohort_size=0
            ),
            SimulatedBackend(training_data=users, val_data=users),
            model,
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.RATE, local_batch_size=workload.BATCH),
            NNEvalHyperParams(local_batch_size=workload.SAMPLES),
            callbacks=callbacks,
            send_metrics_to_platform=False,
        )

    first = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    train(1, [])
    net.load_state_dict(first)
    laps.start()
    train(workload.ROUNDS, [Timer(laps)])
    if os.environ.get("RANK", "0") == "0":
        laps.report(net, work)


main()
