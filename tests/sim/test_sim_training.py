"""The simulator's training engine: the same deltas as a real node's trainer, whatever path and worker they come from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.sim_tasks import Blobs, Failing, Local
from torch import Tensor

from fleetddp.common.config import EdgeConfig
from fleetddp.common.errors import ConfigError, LayoutMismatch
from fleetddp.common.layout import Layout
from fleetddp.edge.sim.batched import Stacked, Unsuitable
from fleetddp.edge.sim.calibration import calibrate
from fleetddp.edge.sim.shared import SharedObject, SharedRows
from fleetddp.edge.sim.single import Outcome, Single, TaskFailed, finite, plain_sgd
from fleetddp.edge.sim.training import Engine, Job, Trained, WorkerLost, _chunks, _equal_chunks
from fleetddp.edge.trainer import DeltaTrainer

SEED = 11
PATIENCE_S = 60.0


def weights(task: Blobs, number: int = 0) -> Tensor:
    """Weights to begin at, others for each number."""
    model = task.model()
    base = Layout.from_module(model).read(model)
    return base + 0.01 * number * torch.linspace(-1, 1, len(base))


def trained_singly(task: Blobs, jobs: list[Job]) -> tuple[Tensor, list[Outcome]]:
    single = Single(task, "average")
    deltas = torch.full((len(jobs), single.layout.elements), torch.nan)
    return deltas, single.train(jobs, lambda version: weights(task, version), deltas)


def as_a_node(task: Blobs, job: Job, units: int) -> list[tuple[Tensor, float, float]]:
    """Delta, samples and loss of each of the first units of work of a real node that adopts the same weights before each."""
    config = EdgeConfig(steps=job.steps, epochs=job.epochs, batch_size=job.batch_size)
    trainer = DeltaTrainer(task, job.member, config, seed=job.seed)
    base = weights(task, job.version)
    found = []
    for _ in range(units):
        trainer.adopt(base)
        torch.manual_seed(1)
        work = trainer.train(lambda: True)
        assert work is not None
        found.append((trainer.layout.outgoing(trainer.model, base), work.samples, work.loss))
    return found


# ---- one path's numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["subset", "tensors", "list", "stream"])
@pytest.mark.parametrize("work", [{"steps": 4}, {"epochs": 2}, {"steps": 7}], ids=str)
def test_every_unit_of_work_is_the_trainers_to_the_bit(data: str, work: dict[str, int]) -> None:
    task = Blobs(data=data)
    job = Job("23-a", version=1, batch_size=5, seed=SEED, **work)  # 5 batches an epoch, the last of 3 samples
    batches = job.steps or 10
    jobs = [job._replace(before=batches * unit) for unit in range(3)]
    deltas, outcomes = trained_singly(task, jobs)
    for (delta, samples, loss), mine, outcome in zip(as_a_node(task, job, 3), deltas, outcomes, strict=True):
        torch.testing.assert_close(mine, delta, rtol=0, atol=0)
        assert outcome == Outcome(samples, batches, loss, True)
    assert not torch.equal(deltas[0], deltas[1]) or data == "stream"


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("mlp", "decay"), ("mlp", "momentum"), ("mlp", "adam"), ("mlp-penalty", "sgd"), ("bfloat16", "sgd"), ("unused", "decay")]
    + [("cnn", "sgd"), ("norm", "sgd"), ("norm", "adam"), ("line", "sgd"), ("twice", "sgd"), ("mlp-centred", "sgd")],
)
def test_any_model_and_optimizer_gives_the_trainers_delta_to_the_bit(kind: str, optimizer: str) -> None:
    task = Blobs(kind, optimizer)
    jobs = [Job("17-a", 0, batch_size=4, seed=SEED), Job("17-b", 1, batch_size=4, seed=SEED)]
    deltas, outcomes = trained_singly(task, [*jobs, jobs[0]])
    for job, mine, outcome in zip(jobs, deltas, outcomes, strict=False):
        ((delta, samples, loss),) = as_a_node(task, job, 1)
        torch.testing.assert_close(mine, delta, rtol=0, atol=0)
        assert (outcome.samples, outcome.loss) == (samples, loss)
    assert torch.equal(deltas[0], deltas[2]), "what a client did must not be felt by the next"


def test_buffers_are_sent_as_values_and_the_gap_before_them_is_zero() -> None:
    task = Blobs("norm")
    single = Single(task, "average")
    deltas, _ = trained_singly(task, [Job("8-a", 0, batch_size=8)])
    running = torch.full((8,), 0.9)  # of a variance of 1, after one batch: 0.9 + 0.1 * the batch's variance
    mean, variance = (next(s for s in single.layout.tensors if s.name == f"2.running_{n}") for n in ("mean", "var"))
    assert (deltas[0, variance.start : variance.stop] > running).all()
    assert (deltas[0, mean.start : mean.stop] != 0).all()
    assert not deltas[0, single.layout.parameters : single.layout.buffer_start].any()


def test_dropout_follows_from_the_job_alone() -> None:
    task = Blobs("dropout")
    one, other = Job("20-a", 0, seed=SEED), Job("20-b", 0, seed=SEED)
    deltas, _ = trained_singly(task, [one, other, one])
    assert torch.equal(deltas[0], deltas[2])
    assert not torch.equal(deltas[0], deltas[1])


def test_only_plain_sgd_is_taken_for_it() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    plain = torch.optim.SGD([parameter], lr=0.5, weight_decay=0.1)
    assert plain_sgd(plain, [parameter]) == (0.5, 0.1)
    torch.optim.lr_scheduler.StepLR(plain, 1)
    others = [torch.optim.SGD([parameter], lr=0.5, momentum=0.1), torch.optim.SGD([parameter], lr=0.5, maximize=True)]
    others += [torch.optim.Adam([parameter]), torch.optim.SGD([parameter], lr=torch.tensor(0.5)), plain]
    assert [plain_sgd(optimizer, [parameter]) for optimizer in others] == [None] * 5
    assert plain_sgd(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.5), [parameter]) is None


def test_a_sum_that_overflows_is_not_taken_for_divergence() -> None:
    large = torch.full((4,), 2e38)
    assert finite(large, float(large.sum()))
    large[2] = torch.nan
    assert not finite(large, float(large.sum()))


# ---- the paths agree ---------------------------------------------------------------------------------------------------

MIXED = [
    Job(f"{size}-{i}", version, batch_size=5, epochs=2, seed=SEED)
    for i, (size, version) in enumerate([(13, 0), (13, 0), (8, 0), (13, 1), (13, 0)])
]


@pytest.mark.parametrize("data", ["subset", "tensors", "list"])
@pytest.mark.parametrize(("kind", "optimizer"), [("mlp", "sgd"), ("mlp", "decay"), ("line", "sgd")])
def test_stacked_clients_agree_with_single_ones(kind: str, optimizer: str, data: str) -> None:
    task = Blobs(kind, optimizer, data=data)
    single = Single(task, "average")
    expected, outcomes = trained_singly(task, MIXED)
    deltas = torch.full_like(expected, torch.nan)
    found = Stacked(task, single).train(MIXED, lambda version: weights(task, version), deltas)
    torch.testing.assert_close(deltas, expected, rtol=0, atol=1e-5)
    for mine, theirs in zip(found, outcomes, strict=True):
        assert mine[:2] + mine[3:] == theirs[:2] + theirs[3:]
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_channels_last_agrees_with_the_plain_path() -> None:
    task = Blobs("cnn")
    expected, _ = trained_singly(task, MIXED)
    other = Single(task, "average", channels_last=True)
    assert other.model[1].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr, index, operator]
    deltas = torch.full_like(expected, torch.nan)
    other.train(MIXED, lambda version: weights(task, version), deltas)
    torch.testing.assert_close(deltas, expected, rtol=0, atol=1e-5)


def test_a_client_that_diverges_does_not_touch_those_stacked_with_it() -> None:
    task = Blobs(data="tensors")
    jobs = [Job("10-a", 0, batch_size=5), Job("10-bad", 0, batch_size=5), Job("10-b", 0, batch_size=5)]
    single = Single(task, "average")
    expected, _ = trained_singly(task, jobs)
    deltas = torch.zeros_like(expected)
    outcomes = Stacked(task, single).train(jobs, lambda version: weights(task), deltas)
    assert [outcome.finite for outcome in outcomes] == [True, False, True]
    torch.testing.assert_close(deltas[::2], expected[::2], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "optimizer", "why"),
    [
        ("mlp", "momentum", "the optimizer is not plain SGD"),
        ("norm", "sgd", "the model has buffers"),
        ("cnn", "sgd", "1.weight is not a parameter of an nn.Linear"),
        ("unused", "sgd", "idle is not a parameter of an nn.Linear"),
        ("mlp-penalty", "sgd", "the loss uses the model's parameters"),
        ("twice", "sgd", "a layer is used twice before a step"),
        ("mlp-centred", "sgd", "deltas differ from the plain path's by up to"),
        ("dropout", "sgd", "deltas differ from the plain path's by up to"),
    ],
)
def test_calibration_tells_why_clients_cannot_be_stacked(kind: str, optimizer: str, why: str) -> None:
    task = Blobs(kind, optimizer)
    single = Single(task, "average")
    found = calibrate(task, single, "average", MIXED[:2], lambda version: weights(task))
    assert why in found.why_not["stacked"]
    assert "single" in found.seconds
    assert found.path != "stacked"


def test_calibration_chooses_the_path_that_took_least() -> None:
    task = Blobs()
    single = Single(task, "average")
    jobs = [Job(f"20-{i}", 0, batch_size=5) for i in range(10)]
    found = calibrate(task, single, "average", jobs, lambda version: weights(task))
    assert found.seconds.keys() == {"single", "stacked"}
    assert (found.path == "stacked") == (found.seconds["stacked"] < 0.95 * found.seconds["single"])
    assert found.path == "stacked"  # ten clients for the price of little more than one
    with pytest.raises(Unsuitable, match=r"no nn\.Conv2d"):
        raise Unsuitable(found.why_not["channels_last"])


# ---- shared memory and the order of work -------------------------------------------------------------------------------


def test_a_shared_object_is_whole_and_its_users_do_not_see_each_others_writes() -> None:
    flat = torch.arange(6.0)
    value = {"flat": flat, "view": flat.view(2, 3).t(), "half": torch.ones(3, dtype=torch.bfloat16), "array": flat.numpy()[1:3]}
    value["weight"] = torch.nn.Parameter(torch.ones(2))
    value["empty"] = torch.zeros(0, 4)
    shared = SharedObject(value)
    one, other = shared.load(), shared.load()
    shared.close()
    for name, tensor in value.items():
        torch.testing.assert_close(torch.as_tensor(one[name]), torch.as_tensor(tensor), msg=name)
    assert isinstance(one["weight"], torch.nn.Parameter)
    one["flat"][1] = 9.0
    assert one["view"][1, 0] == 9.0, "what shared memory must go on sharing it"
    assert other["flat"][1] == 1.0


def test_rows_are_the_same_memory_to_all_who_ask() -> None:
    rows = SharedRows(2, 5)
    rows.block(3)[1] = 4.0
    assert rows.block(0).tolist() == [[0.0] * 5] * 2
    assert rows.block(3).tolist() == [[0.0] * 5, [4.0] * 5]
    rows.close()


def test_the_longest_jobs_come_first_and_chunks_shrink_towards_the_end() -> None:
    equal = [Job(f"{i}", 0, samples=50) for i in range(50)]
    chunks = list(_chunks(equal, 10, 2))
    assert [len(chunk) for chunk in chunks] == [10, 10, 10, 10, 5, 2, 1, 1, 1]
    assert [job for chunk in chunks for job in chunk] == equal
    one_long = [Job("long", 0, samples=10_000), *equal]
    assert [len(chunk) for chunk in _chunks(one_long, 10, 2)][:3] == [1, 10, 10]
    by_steps = [Job("steps", 0, steps=100, batch_size=10), Job("unknown", 0)]
    assert [len(chunk) for chunk in _chunks(by_steps, 10, 1)] == [2]


def test_stacks_are_as_large_as_they_may_be_and_the_same_for_every_worker() -> None:
    jobs = [Job(f"{n}", 0) for n in range(50)]
    chunks = list(_equal_chunks(jobs, 16, 2))
    assert [len(chunk) for chunk in chunks] == [12, 13, 12, 13]
    assert [job for chunk in chunks for job in chunk] == jobs
    assert [len(chunk) for chunk in _equal_chunks(jobs, 25, 2)] == [25, 25]
    assert [len(chunk) for chunk in _equal_chunks(jobs[:3], 16, 4)] == [1, 1, 1]
    assert list(_equal_chunks([], 16, 2)) == []


# ---- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    task = Blobs()
    with Engine(task, workers=2, path="single") as engine:
        for version in (0, 1):
            engine.put(version, weights(task, version))
        yield engine


def by_job(found: Iterator[Trained]) -> dict[Job, Trained]:
    return {trained.job: trained for trained in found}


def test_workers_give_the_trainers_deltas_from_whatever_version(engine: Engine) -> None:
    jobs = [Job(f"{5 + i % 7}-{i}", i % 2, batch_size=4, seed=SEED) for i in range(40)]
    found = by_job(engine.train(jobs))
    assert set(found) == set(jobs)
    deltas, outcomes = trained_singly(Blobs(), jobs)
    for job, delta, outcome in zip(jobs, deltas, outcomes, strict=True):
        assert torch.equal(found[job].delta, delta)
        assert found[job][2:] == (outcome.samples, outcome.steps, {"train_loss": outcome.loss}, False)


def test_a_diverged_client_is_reported_and_the_others_trained(engine: Engine) -> None:
    found = by_job(engine.train([Job("6-bad", 0), Job("6-good", 0)]))
    assert {job.member: trained.diverged for job, trained in found.items()} == {"6-bad": True, "6-good": False}
    assert found[Job("6-bad", 0)].metrics == {}


def test_an_error_of_the_task_names_the_member_and_the_engine_goes_on(engine: Engine) -> None:
    with pytest.raises(TaskFailed, match=r"training '6-broken': RuntimeError: the sensor is broken") as caught:
        list(engine.train([Job("6-broken", 0), *(Job(f"6-{i}", 0) for i in range(30))]))
    assert caught.value.member == "6-broken"
    assert "in loss" in str(caught.value.__cause__), "where it happened"
    with pytest.raises(TaskFailed, match="ConfigError: the task has no data for '0-none': its dataset is empty"):
        list(engine.train([Job("0-none", 0)]))
    assert len(by_job(engine.train([Job("6-a", 0)]))) == 1


def test_whoever_stops_asking_may_ask_again(engine: Engine) -> None:
    jobs = [Job(f"9-{i}", 0) for i in range(40)]
    next(engine.train(jobs))
    found = by_job(engine.train(jobs[:3]))
    deltas, _ = trained_singly(Blobs(), jobs[:3])
    assert all(torch.equal(found[job].delta, delta) for job, delta in zip(jobs, deltas, strict=False))
    assert list(engine.train([])) == []


def test_weights_are_held_until_they_are_dropped(engine: Engine) -> None:
    base = weights(Blobs(), 5)
    engine.put(7, base)
    engine.put(7, base.clone())
    with pytest.raises(ValueError, match="version 7 is held already, with other weights: drop it first"):
        engine.put(7, base + 1)
    assert engine.held == [0, 1, 7]
    engine.drop(7)
    engine.drop(7)
    with pytest.raises(ValueError, match="no weights are held for version 7: put them first"):
        engine.train([Job("5-a", 7), Job("5-a", 0)])
    engine.put(8, base)  # takes the place of 7
    trained = by_job(engine.train([Job("5-a", 8)]))[Job("5-a", 8)]
    engine.drop(8)
    assert torch.equal(trained.delta, trained_singly(Blobs(), [Job("5-a", 5)])[0][0])
    with pytest.raises(LayoutMismatch, match=r"torch\.float32 of shape \(276,\), not torch\.float32 of shape \(3,\)"):
        engine.put(9, torch.zeros(3))


def test_the_engine_finds_the_fastest_path_by_itself_and_reports_a_lost_worker() -> None:
    task = Blobs()
    jobs = [Job(f"20-{i}", 0, batch_size=5, samples=20) for i in range(30)]
    with Engine(task, workers=2, layout=Single(task, "average").layout) as engine:
        engine.put(0, weights(task))
        assert engine.path is None
        found = by_job(engine.train(jobs))
        assert engine.found is not None
        assert engine.path == engine.found.path
        deltas, _ = trained_singly(task, jobs)
        for job, delta in zip(jobs, deltas, strict=True):
            torch.testing.assert_close(found[job].delta, delta, rtol=0, atol=1e-5)
        os.kill(engine.pids[1], signal.SIGKILL)
        with pytest.raises(
            WorkerLost, match=r"worker process 1 \(pid \d+\) ended with exit code -9 while it was to do: train 20-"
        ):
            list(engine.train(jobs))
    engine.close()


def test_what_cannot_be_given_to_workers_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"the task Local cannot be given to worker processes: cannot pickle '_thread.lock'"):
        Engine(Local())
    with pytest.raises(ConfigError, match="at least one worker process; got 0"):
        Engine(Blobs(), workers=0)


def test_an_error_while_calibrating_names_the_member_and_a_wrong_layout_is_told() -> None:
    with Engine(Failing(), workers=1) as engine:
        engine.put(0, torch.zeros(engine.layout.elements))
        with pytest.raises(TaskFailed, match="training '5-a': ConfigError: nobody is called '5-a'"):
            list(engine.train([Job("5-a", 0)]))
    with Engine(Blobs("line"), layout=engine.layout, workers=1) as other, pytest.raises(LayoutMismatch, match="not the fleet's"):
        other.start()


def test_workers_end_with_their_parent() -> None:
    """In the middle of a job. Standard output ends when the last process that holds it has ended."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    numbers = (signal.SIGKILL, signal.SIGINT)
    with ExitStack() as stack:
        start = partial(subprocess.Popen, [sys.executable, "-m", "helpers.sim_tasks"], env=environment, start_new_session=True)
        parents = [stack.enter_context(start(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)) for _ in numbers]
        for parent, number in zip(parents, numbers, strict=True):
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"began\n"
            if number == signal.SIGINT:
                os.killpg(parent.pid, number)  # as a terminal does
            else:
                parent.send_signal(number)
            assert parent.communicate(timeout=PATIENCE_S) == (b"", None)
            assert parent.returncode == -number


def test_an_optimizer_is_made_without_importing_torchs_compiler() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    program = (
        "import sys; from helpers.sim_tasks import Blobs; from fleetddp.edge.sim.single import Single;"
        "Single(Blobs(), 'average'); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=PATIENCE_S).returncode == 0
