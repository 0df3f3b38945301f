"""The demo: a small GPT of `Attention` layers learns a text, one character at a time, in about a minute on a CPU.

`prepare` checks every option and reads the text, `train` learns, `generate` writes, and `run` shows it on a console.
Then the same model is shown on torch's layer beside it: see `side_by_side.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from multihead.errors import bad_value, check_size
from multihead.explaining.explain import explain
from multihead.models.generation import generate
from multihead.models.gpt import GPT, loss_of
from multihead.module import Attention
from multihead.side_by_side import Sizes, Together, peak_memory, table, train_all
from multihead.training.language import text_loss
from multihead.training.options import MOST_THREADS, check_model_sizes, check_range, check_real
from multihead.training.progress import INTERRUPTED, display, say
from multihead.training.texts import read_text

_TOKENS_PER_STEP = 512  # few, so that a minute on a slow CPU still holds many steps
_LEARNING_RATE = 3e-3
_MOST_PARAMETERS = 100_000_000
_MOST_CONTEXT = 8192
_MOST_COMPARED_SECONDS = 16.0
_MOST_COMPARED_STEPS = 60  # where steps were asked for: takes about as long


# What is asked for --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A demo that can be run: everything checked, the text read."""

    vocabulary: str  # each character once, in order; a token is an index into it
    train: Tensor  # (N,) tokens to learn from, N > context
    valid: Tensor  # (M,) tokens that are kept back to judge by, M >= 2
    prompt: Tensor  # (P,) tokens that the sample starts with
    sample_length: int
    seconds: float  # training ends after this time
    steps: float  # or after so many steps; the one that was not asked for is infinite
    seed: int
    context: int
    width: int
    layers: int
    heads: int
    threads: int
    compare: bool  # whether the same model is shown on torch's layer

    @property
    def sizes(self) -> Sizes:
        """Of the model and of a step."""
        batch = max(1, _TOKENS_PER_STEP // self.context)
        return Sizes(len(self.vocabulary), self.context, self.width, self.layers, self.heads, batch)

    def spell(self, tokens: Tensor) -> str:
        """The characters of tokens."""
        return "".join(self.vocabulary[int(token)] for token in tokens)


def prepare(
    *,
    text: Path | None,
    seconds: float | None,
    steps: int | None,
    seed: int,
    context: int,
    width: int,
    layers: int,
    heads: int,
    threads: int,
    prompt: str | None,
    sample_length: int,
    compare: bool,
) -> Plan:
    """Check everything and read the text, before anything is computed.

    Args:
        text: a UTF-8 file; None for the language reference that comes with Python.
        seconds, steps: how long to train; one of the two, or none for a minute.
        seed: of everything random, from 0 on.
        context: how many characters the model sees at once.
        width, layers, heads: size of the model.
        threads: how many of the CPU's cores to use.
        prompt: what the sample starts with; None for a new line.
        sample_length: how many characters to write.
        compare: whether to show the same model on torch's layer.

    Raises:
        ValueError, TypeError: something can't be done; the message names the command line's option.
    """
    if steps is not None and seconds is not None:
        otherwise = "Training ends after one of the two."
        raise bad_value("--steps, --seconds", "one of the two", f"{steps} and {seconds:g}", otherwise, "Leave one out.")
    if steps is None:
        seconds = check_real("--seconds", 60.0 if seconds is None else seconds, above=True)
    else:
        check_size("--steps", steps)
    check_range("--seed", seed, 0, 2**63 - 1)
    check_range("--context", context, 1, _MOST_CONTEXT)
    check_range("--threads", threads, 1, MOST_THREADS)
    check_size("--sample-length", sample_length)
    check_model_sizes(width=width, layers=layers, heads=heads)

    characters = read_text(text)
    vocabulary = "".join(sorted(set(characters)))
    parameters = width * (12 * layers * width + len(vocabulary))  # nearly: without norms and biases
    if parameters > _MOST_PARAMETERS:
        expected = f"a model of at most {_MOST_PARAMETERS:,} parameters"
        otherwise = "It would learn next to nothing in the time that a demo has."
        raise bad_value("--width, --layers", expected, f"{parameters:,}", otherwise, "Choose smaller ones.")
    least = max(10 * context // 9 + 1, context + 3)
    if len(characters) < least:
        expected = f"at least {least} characters for --context {context}"
        otherwise = f"Nine tenths have to hold {context} characters and the next one, and the rest is kept back."
        instead = "Take a longer text or a smaller --context."
        raise bad_value("--text", expected, f"{len(characters)}", otherwise, instead)

    token_of = {character: i for i, character in enumerate(vocabulary)}
    if prompt is None:
        prompt = "\n" if "\n" in token_of else characters[0]
    if not prompt:
        raise bad_value("--prompt", "at least one character", "none", "", "Leave it out to start with a new line.")
    strange = "".join(dict.fromkeys(character for character in prompt if character not in token_of))
    if strange:
        instead = "The model knows no others: write the prompt without them."
        raise bad_value("--prompt", "characters that occur in the text", ascii(strange), "", instead)

    tokens = torch.tensor([token_of[character] for character in characters])
    kept_back = max(2, len(tokens) // 10)
    return Plan(
        vocabulary=vocabulary,
        train=tokens[:-kept_back],
        valid=tokens[-kept_back:],
        prompt=torch.tensor([token_of[character] for character in prompt]),
        sample_length=sample_length,
        seconds=math.inf if seconds is None else seconds,
        steps=math.inf if steps is None else steps,
        seed=seed,
        context=context,
        width=width,
        layers=layers,
        heads=heads,
        threads=threads,
        compare=compare,
    )


# Learning -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """Where training stands."""

    steps: int
    tokens: int
    seconds: float
    share: float  # of the whole training, 0 to 1
    loss: float  # nats per token, a mean over about the last 50 steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def train(model: GPT, plan: Plan) -> Iterator[Reached]:
    """Train as planned, one step each time that the next item is asked for.

    AdamW; the rate rises over the first twentieth and then falls as a cosine (Loshchilov & Hutter 2017), over the
    steps or over the time. Draws from torch's global generator: by steps it repeats under `torch.manual_seed`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    batch, offsets = plan.sizes.batch, torch.arange(plan.context + 1)
    start, step, share, total, weight = perf_counter(), 0, 0.0, 0.0, 0.0
    while share < 1:
        rate = max(0.02, min(share / 0.05, (1 + math.cos(math.pi * share)) / 2))
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * rate
        places = torch.randint(len(plan.train) - plan.context, (batch, 1)) + offsets  # (B, context + 1)
        piece = plan.train[places]
        loss = loss_of(model, piece[:, :-1], piece[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        step += 1
        total, weight = 0.98 * total + loss.item(), 0.98 * weight + 1
        seconds = perf_counter() - start
        share = min(1.0, max(step / plan.steps, seconds / plan.seconds))
        yield Reached(step, step * plan.sizes.tokens, seconds, share, total / weight)


def validate(model: GPT, plan: Plan) -> float:
    """Loss on the text kept back, in nats per token: over evenly spread pieces of it, if it is long."""
    return text_loss(model, plan.valid, context=plan.context, batch=plan.sizes.batch)


# On the console -----------------------------------------------------------------------------------------------------


def run(plan: Plan, console: Console) -> int:
    """Train, show what was learned, then the model on torch's layer. Ctrl-C ends it early, with what has been reached.

    Returns:
        The exit code: 0, or `INTERRUPTED`.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    torch.manual_seed(plan.seed)
    model = plan.sizes.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    reached = None
    try:
        say(console, f"{len(plan.train):,} characters to learn from, {len(plan.valid):,} kept back to judge by.")
        say(console, f"{parameters:,} parameters, --threads {plan.threads}. Ctrl-C ends it early.\n")
        with display(console) as show:
            for reached in train(model, plan):
                show(reached.share, reached.seconds, _line(reached))
        assert reached is not None  # a plan has at least one step
        _report(console, model, plan, parameters, reached)
    except KeyboardInterrupt:
        if reached is None:
            say(console, "\nStopped before the first step.")
        else:
            say(console, f"\nStopped after step {reached.steps:,}, at a training loss of {reached.loss:.3f}.")
            _show_sample(console, model, plan, min(plan.sample_length, 100))
        return INTERRUPTED
    else:
        return _compare(console, plan) if plan.compare else 0
    finally:
        torch.set_num_threads(threads_before)


def _compare(console: Console, plan: Plan) -> int:
    """Show the same model on torch's layer: as it is, swapped, and beside `Attention`.

    Returns:
        The exit code.
    """
    sizes = plan.sizes
    lasts = {"seconds": min(plan.seconds, _MOST_COMPARED_SECONDS), "steps": math.inf}
    if plan.steps < math.inf:
        lasts = {"seconds": math.inf, "steps": min(plan.steps, _MOST_COMPARED_STEPS)}
    say(console, "\nThe same model on torch.nn.MultiheadAttention, from the same weights on the same batches of")
    say(console, f"{sizes.batch} x {sizes.context} characters, a step of each in turn:\n")
    done = []
    try:
        with display(console) as show:
            for step in train_all(plan.train, sizes, seed=plan.seed, **lasts):
                done.append(step)
                show(step.share, step.seconds, f"step {len(done):,}  losses {_losses(step)}")
            show(1.0, step.seconds, "now the peak memory of each, in a process of its own")
            memory = peak_memory(sizes, plan.threads)
    except KeyboardInterrupt:
        say(console, "\nStopped: the comparison was not finished.")
        return INTERRUPTED
    say(console, "")
    for line in table(done, sizes, memory):
        say(console, line)
    return 0


def _losses(step: Together) -> str:
    return ", ".join(f"{loss:.3f}" for loss in step.losses)


def _line(reached: Reached) -> str:
    return f"step {reached.steps:,}  loss {reached.loss:.3f}  {reached.tokens_per_second:,.0f} tokens/s"


def _report(console: Console, model: GPT, plan: Plan, parameters: int, reached: Reached) -> None:
    loss = validate(model, plan)
    bits, even, memory = loss / math.log(2), math.log(len(plan.vocabulary)), _peak_memory()
    rows = {
        "parameters": f"{parameters:,}",
        "steps": f"{reached.steps:,} of {plan.sizes.batch} x {plan.context} tokens, in {reached.seconds:.1f} s",
        "tokens seen": f"{reached.tokens:,}, {reached.tokens / len(plan.train):.2f} times the text",
        "training loss": f"{reached.loss:.3f} nats per character",
        "validation loss": f"{loss:.3f} nats per character, {bits:.3f} bits, perplexity {math.exp(loss):.1f}",
        "  to compare": f"{even:.3f} nats, an even guess among {len(plan.vocabulary)} characters",
        "speed": f"{reached.tokens_per_second:,.0f} tokens/s",
        "peak memory": "unknown" if memory is None else f"{memory / 2**20:,.0f} MiB, of the whole process",
    }
    say(console, "")
    for name, value in rows.items():
        say(console, f"{name:<17}{value}")
    _show_sample(console, model, plan, plan.sample_length)
    say(console, "\nHow the first layer's attention is computed:")
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    say(console, str(explain(layer, batch=plan.sizes.batch, length=plan.context, training=True)))


def _show_sample(console: Console, model: GPT, plan: Plan, length: int) -> None:
    say(console, "\nA sample:")
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "seed": plan.seed, "context": plan.context}
    written = generate(model, [plan.prompt], max_new_tokens=length, **options)[0]
    console.print(Text.assemble((plan.spell(plan.prompt), "bold"), plan.spell(written)), soft_wrap=True)


def _peak_memory() -> int | None:
    """The most memory this process has had, in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
