"""The program of tests/integration/test_fork.py: ``forking_trainer.py ADDRESS`` trains, as far as a fork can tell."""

from __future__ import annotations

import json
import random
import sys
import threading

import google_crc32c
import torch
from torch.utils.data import DataLoader, TensorDataset

from fleetddp.common import fork
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import Unreachable
from fleetddp.common.events import Join
from fleetddp.common.transport.session import Session
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.update import Kind, Slice, Tier, UpdateHeader, UpdateId

EPOCHS = 8


def train(address: str) -> None:
    uplink = Uplink(address, SecurityConfig(), node="site-a", rng=random.Random(0))
    session = Session(uplink, Join(node="site-a", tier=Tier.SITE, incarnation=1), rng=random.Random(0))
    session.start()
    session.joined()
    layout = uplink.layout()
    payload = memoryview(bytes(4 * layout.parameters))
    part = Slice(intervals=((0, layout.parameters),), samples=1.0, digest=google_crc32c.value(bytes(payload)))
    moved = {"pulled": 0, "pushed": 0}
    faults: list[BaseException] = []
    both_move = threading.Barrier(3)

    def pull() -> None:
        uplink.pull(-1, (), lambda offset, data: None)

    def push() -> None:
        update_id = UpdateId("site-a", 1, moved["pushed"])
        uplink.push(
            UpdateHeader(
                update_id=update_id,
                kind=Kind.DELTA,
                tier=Tier.SITE,
                base_version=0,
                codec="float32",
                layout=layout.fingerprint,
            ),
            part,
            payload,
        )

    def repeat(name: str) -> None:
        work = {"pulled": pull, "pushed": push}[name]
        try:
            work()
            both_move.wait()
            while True:
                work()
                moved[name] += 1
        except Unreachable:  # closed at the end
            return
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=repeat, args=(name,)) for name in moved]
    for thread in threads:
        thread.start()
    both_move.wait()
    rows = []
    data = TensorDataset(torch.arange(64.0))
    for _ in range(EPOCHS):
        loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork", timeout=30)
        rows.append(sum(float(batch.sum()) for (batch,) in loader))
    session.stop(leave=True)
    uplink.close()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    print(json.dumps({"epochs": EPOCHS, "rows": rows, "advice": fork.advice(), **moved}))


if __name__ == "__main__":
    train(sys.argv[1])
