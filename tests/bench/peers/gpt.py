"""The work that every arm of ``diloco.py`` does; it needs torch alone, as it runs in the peers' environments too.

A byte-level GPT of 4.9 million parameters learns the sources of the running Python's standard library; every tenth file is held
out. Which bytes a rank sees at a step depends on the seed, the rank and the step only: arms of equal steps have seen the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, CONTEXT, BYTES = 256, 6, 8, 128, 256
RATE, BETAS, DECAY, RAMP = 1e-3, (0.9, 0.95), 0.1, 20  # AdamW; steps until the rate is full
CLIP = 1.0  # of the gradient's norm
HELD_OUT = 12  # batches of 8 that are evaluated
PATIENCE_S = 120.0


class Corpus(NamedTuple):
    """u8 tensors, and whose bytes they are."""

    training: Tensor
    held_out: Tensor
    digest: str


def corpus() -> Corpus:
    """The top-level modules of the standard library, in the order of their names."""
    files = sorted(f for f in Path(sysconfig.get_path("stdlib")).glob("*.py") if not f.name.startswith("_sysconfigdata"))
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) is held) for held in (False, True)]
    digest = hashlib.sha256(b"|".join(parts)).hexdigest()[:12]
    training, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return Corpus(training, held_out, digest)


def batch(text: Tensor, size: int, *key: int) -> tuple[Tensor, Tensor]:
    """``size`` windows of the text and, for each position, the byte that follows; drawn by ``key``."""
    number = 0
    for part in key:
        number = number * 1_000_003 + part
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=torch.Generator().manual_seed(number))
    windows = text.unfold(0, CONTEXT + 1, 1)[starts].long()
    return windows[:, :-1], windows[:, 1:]


class Layer(nn.Module):
    """Attention and a perceptron, each after a normalisation and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_perceptron = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.before_attention(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.perceptron(self.before_perceptron(x))
        return out


class GPT(nn.Module):
    """Logits of the next byte are not returned: the model's output is its mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)
                if getattr(part, "bias", None) is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layers(self.byte(x) + self.place.weight)
        return F.cross_entropy(self.head(self.last(hidden)).flatten(0, 1), y.flatten())


def made(seed: int) -> tuple[GPT, torch.optim.Optimizer]:
    """The model and its optimizer, alike in every process of an arm."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Mean loss over the held-out batches, the same ones whatever the seed."""
    return statistics.fmean(float(model(*batch(text, 8, 99, index))) for index in range(HELD_OUT))


class Job(NamedTuple):
    """What one process of an arm is told."""

    folder: Path
    rank: int
    seed: int
    steps: int
    batch: int
    settings: dict[str, str]

    @classmethod
    def read(cls, text: str) -> Job:
        """From the JSON that ``write`` gave."""
        folder, *rest = json.loads(text)
        return cls(Path(folder), *rest)

    def write(self) -> str:
        """For a command line."""
        return json.dumps([str(self.folder), *self[1:]])

    def meet(self, word: str, ranks: int = 2) -> None:
        """A start line outside of what is measured: wait until all ranks are here."""
        (self.folder / f"{word}.{self.rank}").touch()
        over = time.monotonic() + PATIENCE_S
        while len(list(self.folder.glob(f"{word}.*"))) < ranks:
            if time.monotonic() > over:
                raise SystemExit(f"rank {self.rank} waited {PATIENCE_S:g} s for the others at {word!r}")
            time.sleep(0.005)

    def warm_up(self, model: nn.Module, text: Tensor) -> None:
        """Allocate; changes no weight."""
        for index in range(3):
            model(*batch(text, self.batch, self.seed, self.rank, 10**7 + index)).backward()
        for parameter in model.parameters():
            parameter.grad = None

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> Watch:
        """All steps; ``model`` is what to call, its parameters those of the optimizer."""
        self.meet("go")
        watch = Watch()
        for step in range(self.steps):
            with watch:
                for group in optimizer.param_groups:
                    group["lr"] = RATE * min(1.0, (step + 1) / RAMP)
                optimizer.zero_grad()
                model(*batch(text, self.batch, self.seed, self.rank, step)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
        return watch

    def report(self, watch: Watch, **found: object) -> None:
        """What this rank measured, for ``diloco.py``."""
        result = {"step_s": watch.steps, "began": watch.began, "ended": watch.ended, "cpu_s": watch.cpu_s, **found}
        (self.folder / f"result.{self.rank}.json").write_text(json.dumps(result))


class Watch:
    """Seconds of each step, wall and CPU, and what went over the loopback device of this network namespace."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.began = self.ended = time.time()
        self.cpu_s = 0.0
        self.sent_before = sent_bytes()

    def __enter__(self) -> None:
        self._at, self._cpu_at = time.perf_counter(), time.process_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.steps.append(time.perf_counter() - self._at)
        self.cpu_s += time.process_time() - self._cpu_at
        self.ended = time.time()

    def sent(self) -> int:
        """Bytes since it began: of all processes in this namespace, headers included."""
        return sent_bytes() - self.sent_before


def sent_bytes() -> int:
    """What the loopback device of this network namespace has sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def in_own_namespace() -> bool:
    """Whether nobody else's traffic is counted."""
    return os.environ.get("BENCH_NAMESPACE") == "own"
