"""The drop-in side by side: one model of torch.nn.MultiheadAttention, trained as it is and with the drop-in swapped in.

`train_both` takes both through the same steps in turn, `peak_memory` asks a process of each for its memory, and `table`
says what came out. As a program, `python -m multihead.side_by_side SIDE THREADS SIZES`, it is such a process.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.swapping import swap

SIDES = ("torch", "multihead")
AGREE = 1e-3  # losses further apart than this, in nats, are no matter of rounding

_STATUS = Path("/proc/self/status")  # where Linux tells a process its memory
_CHILD_STEPS = 5  # the optimizer makes its state in the first; the allocator takes a few more to settle
_CHILD_SECONDS = 120


# The model ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step: small enough for a slow core, long enough that attention counts."""

    vocabulary: int
    context: int = 512
    width: int = 128
    layers: int = 2
    heads: int = 4
    batch: int = 1

    @property
    def tokens(self) -> int:
        """How many tokens a step learns from."""
        return self.batch * self.context


class Block(nn.Module):
    """A pre-norm transformer block of torch's own parts, called as most code calls them."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).triu(1))  # True hides

    def forward(self, x: Tensor) -> Tensor:
        T, y = x.shape[1], self.attention_norm(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask[:T, :T])[0]
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decoder with learned positions: tokens (B, L) -> logits (B, L, vocabulary) of the token after each."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads, sizes.context) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Trainee:
    """A model and its optimizer; the optimizer comes first, so that a swap has to leave it what it holds."""

    def __init__(self, model: Decoder, swapped: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if swapped:
            swap(model)

    def step(self, piece: Tensor) -> float:
        """Learn from a piece (B, context + 1) of the text; the loss before, in nats per token."""
        loss = F.cross_entropy(self.model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


# Training -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Both:
    """One step of both sides; pairs are in the order of `SIDES`."""

    losses: tuple[float, float]  # in nats per token
    took: tuple[float, float]  # seconds
    share: float  # of all that is to be done so far, 0 to 1
    seconds: float  # since the start


def train_both(text: Tensor, sizes: Sizes, *, seed: int, seconds: float, steps: float) -> Iterator[Both]:
    """Train both sides from the same weights on the same pieces of a text, a step each time the next item is asked for.

    Args:
        text: (N,) tokens, N > context.
        sizes: of the model and of a step.
        seed: of the weights and of the pieces; torch's global generator is set to it.
        seconds, steps: it ends when one of the two is reached.
    """
    torch.manual_seed(seed)
    model = Decoder(sizes)
    sides = [Trainee(deepcopy(model), swapped) for swapped in (False, True)]
    offsets = torch.arange(sizes.context + 1)
    start, step, share = perf_counter(), 0, 0.0
    while share < 1:
        piece = text[torch.randint(len(text) - sizes.context, (sizes.batch, 1)) + offsets]  # (B, context + 1)
        losses, took = [0.0, 0.0], [0.0, 0.0]
        # In turn within each step, so that what else the machine does slows both; who is first changes, for the caches.
        for side in (0, 1) if step % 2 else (1, 0):
            begin = perf_counter()
            losses[side] = sides[side].step(piece)
            took[side] = perf_counter() - begin
        step += 1
        now = perf_counter() - start
        share = min(1.0, max(step / steps, now / seconds))
        yield Both((losses[0], losses[1]), (took[0], took[1]), share, now)


# Memory -------------------------------------------------------------------------------------------------------------


def peak_memory(sizes: Sizes, threads: int) -> tuple[int | None, int | None]:
    """What the training of each side adds to the memory of a process that does nothing else, at its peak.

    Returns:
        Bytes, in the order of `SIDES`; None where the system does not tell, or the process failed.
    """
    if not _STATUS.exists():
        return None, None
    try:
        with ExitStack() as stack:
            theirs, ours = [stack.enter_context(_child(side, sizes, threads)) for side in SIDES]
            return _answer(theirs), _answer(ours)
    except OSError:  # no process could be started
        return None, None


@contextmanager
def _child(side: str, sizes: Sizes, threads: int) -> Generator[subprocess.Popen[str], None, None]:
    """A process that measures a side. It is ended with the block, whatever ends that."""
    line = [sys.executable, "-m", __name__, side, str(threads), json.dumps(asdict(sizes))]
    place = Path(__file__).parent.parent  # so that this very package is found, and no file of the user's in its stead
    # Ctrl-C reaches it too: what it says then is nobody's concern.
    with subprocess.Popen(
        line, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _answer(child: subprocess.Popen[str]) -> int | None:
    try:
        told, _ = child.communicate(timeout=_CHILD_SECONDS)
        return int(told) if child.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        return None


def measure(side: str, sizes: Sizes, threads: int) -> int:
    """By how many bytes a few steps of a side raise the peak of this process over what it holds before the first."""
    torch.set_num_threads(threads)
    small = Sizes(3, context=17, width=8, layers=1, heads=2, batch=1)
    _take_steps(_trainee(side, small), small)  # libraries are loaded at the first call
    trainee = _trainee(side, sizes)
    before = _status("VmRSS")
    _take_steps(trainee, sizes)
    # Not ru_maxrss, which a process takes over from the one that started it.
    return _status("VmHWM") - before


def _trainee(side: str, sizes: Sizes) -> Trainee:
    return Trainee(Decoder(sizes), swapped=side == SIDES[1])


def _take_steps(trainee: Trainee, sizes: Sizes) -> None:
    """A few steps on random tokens: memory does not depend on the text."""
    for _ in range(_CHILD_STEPS):
        trainee.step(torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1)))


def _status(name: str) -> int:
    """A figure of this process's memory in bytes."""
    return 1024 * next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name))


# What came out ------------------------------------------------------------------------------------------------------


def table(done: Sequence[Both], sizes: Sizes, memory: tuple[int | None, int | None]) -> list[str]:
    """What both sides reached, as lines: aligned columns, and whether their losses are the same.

    Args:
        done: the steps, at least one.
        sizes: of the model and of a step.
        memory: bytes, in the order of `SIDES`, None where it is not known.
    """
    speeds = [sizes.tokens / median(step.took[side] for step in done) for side in (0, 1)]
    faster = median(step.took[0] / step.took[1] for step in done)  # within a step both met the same machine
    theirs, ours = memory
    rows = [("", *SIDES, "ratio"), ("loss, step 1", *(f"{loss:.3f}" for loss in done[0].losses), "")]
    if len(done) > 1:
        rows.append((f"loss, step {len(done):,}", *(f"{loss:.3f}" for loss in done[-1].losses), ""))
    rows.append(("tokens/s", *(f"{speed:,.0f}" for speed in speeds), f"{faster:.2f}"))
    told = ["unknown" if peak is None else f"{peak / 2**20:,.0f} MiB" for peak in memory]
    rows.append(("peak memory", *told, f"{ours / theirs:.2f}" if ours and theirs else ""))
    return [f"{row[0]:<17}{row[1]:>11}{row[2]:>11}{row[3]:>8}".rstrip() for row in rows] + [_agreement(done)]


def _agreement(done: Sequence[Both]) -> str:
    apart = [abs(step.losses[0] - step.losses[1]) for step in done]
    first = next((i for i, gap in enumerate(apart, 1) if not gap <= AGREE), None)  # NaN agrees with nothing
    if first is not None:
        return f"The losses do not agree: at step {first:,} they are {apart[first - 1]:.1g} apart. Please report this."
    most = max(apart)
    return f"The losses agree to {_rounded_up(most)} at every step." if most else "The losses are equal, bit for bit."


def _rounded_up(number: float) -> str:
    """A number above 0 with one digit: 4.8e-7 as 5e-7."""
    power = math.floor(math.log10(number))
    digit = math.ceil(number / 10.0**power)
    return f"{digit}e{power}" if digit < 10 else f"1e{power + 1}"


if __name__ == "__main__":
    sys.stdout.write(f"{measure(sys.argv[1], Sizes(**json.loads(sys.argv[3])), int(sys.argv[2]))}\n")
