"""The client and server apps of ``flwr_sim.py``, in a module of their own so that Ray finds them by name. Flower draws its own
cohorts, so that its weights are not those of the other arms."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import workload
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client_app, server_app = ClientApp(), ServerApp()
laps = workload.Laps()


@cache
def resident() -> tuple[workload.Work, torch.nn.Module]:
    """Made once in each of Ray's processes: the fast way to write a client."""
    torch.set_num_threads(1)
    return workload.load(), workload.model(os.environ["BENCH_KIND"])


@client_app.query()
def wake(message: Message, context: Any) -> Message:
    resident()
    return Message(RecordDict({"awake": MetricRecord({"yes": 1})}), reply_to=message)


@client_app.train()
def train(message: Message, context: Any) -> Message:
    work, model = resident()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.RATE)
    for rows in work.rows[context.node_config["partition-id"]].split(workload.BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(work.images[rows]), work.labels[rows]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": workload.SAMPLES})}
    return Message(RecordDict(content), reply_to=message)


class Timed(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        result = super().aggregate_train(server_round, replies)
        laps.lap()
        return result


@server_app.main()
def serve(grid: Any, context: Any) -> None:
    work, model = workload.load(), workload.model(os.environ["BENCH_KIND"])
    strategy = Timed(
        fraction_train=workload.COHORT / workload.CLIENTS, fraction_evaluate=0.0, min_available_nodes=workload.CLIENTS
    )
    nodes: list[int] = []
    while len(nodes) < workload.CLIENTS:
        nodes = list(grid.get_node_ids())
    calls = [Message(RecordDict(), message_type="query", dst_node_id=node) for node in nodes[:8]]
    list(grid.send_and_receive(calls))
    laps.start()
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=workload.ROUNDS)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    laps.report(model, work)
