"""The torchft arm of ``diloco.py``: one replica group of one rank, DiLoCo or Streaming DiLoCo, in torchft's own environment."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import gpt
from torch import nn, optim
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo


def cut(model: gpt.GPT, parts: int) -> list[nn.Module]:
    """The model in runs of layers; the first has the embeddings, the last the head."""
    if parts == 1:
        return [model]
    layers = list(model.layers)
    runs = [layers[i * len(layers) // parts : (i + 1) * len(layers) // parts] for i in range(parts)]
    runs[0] = [model.byte, model.place, *runs[0]]
    runs[-1] = [*runs[-1], model.last, model.head]
    return [nn.ModuleList(run) for run in runs]


def main() -> None:
    job = gpt.Job.read(sys.argv[1])
    fragments, delay = (int(job.settings.get(name, default)) for name, default in (("fragments", "1"), ("delay", "0")))
    text = gpt.corpus()
    model, optimizer = gpt.made(job.seed)
    job.warm_up(model, text.training)
    parts = cut(model, fragments)
    options = {"lr": float(job.settings["lr"]), "momentum": float(job.settings["momentum"])}
    outer = [optim.SGD(p.parameters(), nesterov=options["momentum"] > 0, **options) for p in parts]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=2,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        use_async_quorum=False,
        init_sync=False,  # True throws away what all groups but one have learnt by the first exchange
        replica_id=f"group_{job.rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=120),
    )
    every = int(job.settings["every"])
    with DiLoCo(manager, parts, optimizer, outer, sync_every=every, fragment_sync_delay=delay) as diloco:
        watch = job.train(model, optimizer, text.training)
        job.meet("done")
        sent = watch.sent()
        if fragments > 1:  # what all have agreed on; torchft has no public name for it
            diloco._restore_parameters()
    job.report(watch, sent=sent, corpus=text.digest, loss=gpt.evaluate(model, text.held_out))
    manager.shutdown(wait=False)
    sys.stdout.flush()
    os._exit(0)  # its threads need not be waited for


if __name__ == "__main__":
    main()
