"""Side by side: one GPT on torch.nn.MultiheadAttention, as it is called and swapped, and on `Attention`.

`train_all` takes all through the same steps in turn, `peak_memory` asks a process of each for its memory, and `table`
says what came out. As a program, `python -m multihead.side_by_side FORM THREADS SIZES`, it is such a process.
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
from torch import Tensor, nn

from multihead.cache import KVCache
from multihead.models.gpt import GPT, loss_of
from multihead.module import Attention
from multihead.swapping import swap

# Each form of the model, and what it is called in the table.
TORCH, TORCH_FAST, SWAPPED, OURS = "torch", "torch-fast", "swapped", "attention"
FORMS = {
    TORCH: "torch.nn.MultiheadAttention",
    TORCH_FAST: "  called with need_weights=False",
    SWAPPED: "  after multihead.swap(model)",
    OURS: "multihead.Attention",
}
AGREE = 1e-3  # losses further apart than this, in nats, are no matter of rounding

_STATUS = Path("/proc/self/status")  # where Linux tells a process its memory
_CHILD_STEPS = 5  # the optimizer makes its state in the first; the allocator takes a few more to settle
_CHILD_SECONDS = 120


# The model ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    batch: int

    @property
    def tokens(self) -> int:
        """How many tokens a step learns from."""
        return self.batch * self.context

    def model(self) -> GPT:
        """A GPT. Its positions are learned, as torch's layer knows no rotary ones."""
        positions = {"context": self.context, "position": "learned"}
        return GPT(self.vocabulary, self.width, self.layers, self.heads, **positions)  # type: ignore[arg-type]


class TorchAttention(nn.Module):
    """torch's layer in the place of an `Attention` of a GPT, with its weights.

    Args:
        attn: that it takes the place of.
        context: the most tokens.
        fast: whether to call it in the way that torch is fastest in, instead of the way that most code calls it.
    """

    def __init__(self, attn: Attention, context: int, fast: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(attn.embed_dim, attn.num_heads, batch_first=True)
        with torch.no_grad():
            for name in ("weight", "bias"):
                parts = [getattr(projection, name)[rows] for projection, rows in attn.rows_by_part().values()]
                getattr(self.layer, f"in_proj_{name}").copy_(torch.cat(parts))
                getattr(self.layer.out_proj, name).copy_(getattr(attn.out_proj, name))
        self.how = {"need_weights": False, "is_causal": True} if fast else {}
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).triu(1))  # True hides

    def forward(self, x: Tensor, cache: KVCache | None = None, keep: Tensor | None = None) -> Tensor:
        """(B, L, E) -> (B, L, E), as a GPT calls `Attention` to learn."""
        assert cache is None
        assert keep is None
        L = x.shape[1]
        return self.layer(x, x, x, attn_mask=self.mask[:L, :L], **self.how)[0]


class Trainee:
    """A model and its optimizer.

    Args:
        model: on `Attention`; it is changed to the form.
        form: of `FORMS`. The optimizer comes before a swap, which has to leave it what it holds.
    """

    def __init__(self, model: GPT, form: str) -> None:
        self.model = model
        if form != OURS:
            assert model.context is not None
            for block in model.blocks:
                block.attn = TorchAttention(block.attn, model.context, form == TORCH_FAST)  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if form == SWAPPED:
            swap(model)

    def step(self, piece: Tensor) -> float:
        """Learn from a piece (B, context + 1) of the text; the loss before, in nats per token."""
        loss = loss_of(self.model, piece[:, :-1], piece[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


# Training -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Together:
    """One step of every form, in the order of `FORMS`."""

    losses: tuple[float, ...]  # in nats per token
    took: tuple[float, ...]  # seconds
    share: float  # of all that is to be done so far, 0 to 1
    seconds: float  # since the start

    @property
    def apart(self) -> float:
        """How far a loss is from that of torch's layer as it is, at most. NaN if one is."""
        gaps = [abs(loss - self.losses[0]) for loss in self.losses]
        return max(gaps) if all(gap == gap for gap in gaps) else math.nan


def train_all(text: Tensor, sizes: Sizes, *, seed: int, seconds: float, steps: float) -> Iterator[Together]:
    """Train every form from the same weights on the same pieces of a text, a step each time the next item is asked for.

    Args:
        text: (N,) tokens, N > context.
        sizes: of the model and of a step.
        seed: of the weights and of the pieces; torch's global generator is set to it.
        seconds, steps: it ends when one of the two is reached.
    """
    torch.manual_seed(seed)
    model = sizes.model()
    trainees = [Trainee(deepcopy(model), form) for form in FORMS]
    offsets = torch.arange(sizes.context + 1)
    torch.manual_seed(seed)  # the layers of torch drew weights that they don't have any more
    start, step, share = perf_counter(), 0, 0.0
    while share < 1:
        piece = text[torch.randint(len(text) - sizes.context, (sizes.batch, 1)) + offsets]  # (B, context + 1)
        losses, took = [0.0] * len(FORMS), [0.0] * len(FORMS)
        # In turn within each step, so that what else the machine does slows all; who is first changes, for the caches.
        for i in range(len(FORMS)):
            form = (i + step) % len(FORMS)
            begin = perf_counter()
            losses[form] = trainees[form].step(piece)
            took[form] = perf_counter() - begin
        step += 1
        now = perf_counter() - start
        share = min(1.0, max(step / steps, now / seconds))
        yield Together(tuple(losses), tuple(took), share, now)


# Memory -------------------------------------------------------------------------------------------------------------


def peak_memory(sizes: Sizes, threads: int) -> list[int | None]:
    """What the training of each form adds to the memory of a process that does nothing else, at its peak.

    Returns:
        Bytes, in the order of `FORMS`; None where the system does not tell, or the process failed.
    """
    if not _STATUS.exists():
        return [None] * len(FORMS)
    try:
        with ExitStack() as stack:
            return [_answer(child) for child in [stack.enter_context(_child(form, sizes, threads)) for form in FORMS]]
    except OSError:  # no process could be started
        return [None] * len(FORMS)


@contextmanager
def _child(form: str, sizes: Sizes, threads: int) -> Generator[subprocess.Popen[str], None, None]:
    """A process that measures a form. It is ended with the block, whatever ends that."""
    line = [sys.executable, "-m", __name__, form, str(threads), json.dumps(asdict(sizes))]
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


def measure(form: str, sizes: Sizes, threads: int) -> int:
    """By how many bytes a few steps of a form raise the peak of this process over what it holds before the first."""
    torch.set_num_threads(threads)
    small = Sizes(3, context=17, width=8, layers=1, heads=2, batch=1)
    _take_steps(Trainee(small.model(), form), small)  # libraries are loaded at the first call
    trainee = Trainee(sizes.model(), form)
    before = _status("VmRSS")
    _take_steps(trainee, sizes)
    # Not ru_maxrss, which a process takes over from the one that started it.
    return _status("VmHWM") - before


def _take_steps(trainee: Trainee, sizes: Sizes) -> None:
    """A few steps on random tokens: memory does not depend on the text."""
    for _ in range(_CHILD_STEPS):
        trainee.step(torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1)))


def _status(name: str) -> int:
    """A figure of this process's memory in bytes."""
    return 1024 * next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name))


# What came out ------------------------------------------------------------------------------------------------------


def table(done: Sequence[Together], sizes: Sizes, memory: Sequence[int | None]) -> list[str]:
    """What every form reached, as lines: aligned columns, and whether their losses are the same.

    Args:
        done: the steps, at least one.
        sizes: of the model and of a step.
        memory: bytes, in the order of `FORMS`, None where it is not known.
    """
    lines = [f"{'':<34}{'loss, step 1':>13}{f'step {len(done):,}':>11}{'tokens/s':>11}{'ratio':>8}{'peak memory':>14}"]
    for i, name in enumerate(FORMS.values()):
        speed = sizes.tokens / median(step.took[i] for step in done)
        faster = median(step.took[0] / step.took[i] for step in done)  # within a step all met the same machine
        peak = memory[i]
        told = "unknown" if peak is None else f"{peak / 2**20:,.0f} MiB"
        first, last = done[0].losses[i], done[-1].losses[i]
        lines.append(f"{name:<34}{first:>13.3f}{last:>11.3f}{speed:>11,.0f}{faster:>8.2f}{told:>14}")
    return [*lines, _agreement(done)]


def _agreement(done: Sequence[Together]) -> str:
    first = next((i for i, step in enumerate(done, 1) if not step.apart <= AGREE), None)  # NaN agrees with nothing
    if first is not None:
        apart = done[first - 1].apart
        return f"The losses do not agree: at step {first:,} they are {apart:.1g} apart. Please report this."
    most = max(step.apart for step in done)
    return f"The losses agree to {_rounded_up(most)} at every step." if most else "The losses are equal, bit for bit."


def _rounded_up(number: float) -> str:
    """A number above 0 with one digit: 4.8e-7 as 5e-7."""
    power = math.floor(math.log10(number))
    digit = math.ceil(number / 10.0**power)
    return f"{digit}e{power}" if digit < 10 else f"1e{power + 1}"


if __name__ == "__main__":
    sys.stdout.write(f"{measure(sys.argv[1], Sizes(**json.loads(sys.argv[3])), int(sys.argv[2]))}\n")
