"""Generation: a model writes on, token by token, for several prompts at once.

How a token is chosen is in `sampling.py`. Each row of a batch draws from a generator of its own, so that what it writes
does not depend on its neighbours, nor on whether keys and values are cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from multihead.errors import bad_type, bad_value, check_size, describe, is_int
from multihead.models.gpt import GPT
from multihead.models.sampling import Sampling
from multihead.options import check_flags

NOTHING = -1  # what `stream` gives for a row that is finished


def generate(
    model: GPT,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    use_cache: bool = True,
    context: int | None = None,
) -> list[Tensor]:
    """Let a model write on after each prompt.

    The model computes as in eval mode, without gradients. Its logits are changed in this order: `repetition_penalty`,
    `temperature`, `top_k`, `top_p`, `min_p`; then a token is drawn.

    Args:
        model: predicts the next token.
        prompts: (L,) int64 each, of any lengths from 1 on.
        max_new_tokens: how many tokens to write, in rows that meet no stop.
        temperature: from 1e-5 to 1e9, logits are divided by it; 0 takes the likeliest token always.
        top_k: draw from so many of the likeliest tokens.
        top_p: draw from the fewest tokens whose probabilities add up to it; above 0, up to 1.
        min_p: draw from tokens at least so likely as this times the likeliest; from 0 to 1.
        repetition_penalty: above 1, tokens of the row so far, prompt included, become less likely; from 1e-5 to 1e9.
        seed: row 0 draws by it, row i by `row_seed(seed, i)`; None for another text each time.
        stop: token sequences. A row that has written one is finished, and its last tokens are that.
        use_cache: keep keys and values of earlier tokens instead of computing them again. The result is the same.
        context: how many of the last tokens the model is shown; by default all, with learned positions as many as
            there are. Beyond it, the window moves on by a token a step, and is computed anew each time: positions in
            it begin at 0 again, so what a cache holds would be wrong.

    Returns:
        For each prompt the new tokens, (N,) int64 on its device, without the prompt.

    Raises:
        ValueError, TypeError: something does not fit, before any work.
    """
    steps = stream(
        model, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=stop, use_cache=use_cache, context=context,
    )  # fmt: skip
    written = torch.stack(list(steps), 1)  # (B, N)
    return [row[row != NOTHING].to(prompt.device) for row, prompt in zip(written, prompts, strict=True)]


def stream(
    model: GPT,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    use_cache: bool = True,
    context: int | None = None,
) -> Iterator[Tensor]:
    """As `generate`, but gives the tokens of each step as soon as they are made.

    Returns:
        An iterator of (B,) int64 on the CPU, with `NOTHING`, -1, for rows that are finished. It ends when all are.

    Raises:
        ValueError, TypeError: something does not fit, at the call and before any work.
    """
    check_size("max_new_tokens", max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if seed is not None and not (is_int(seed) and 0 <= seed < 2**63):
        raise bad_value("seed", "None or an int from 0 to 2^63 - 1", describe(seed))
    check_flags(use_cache=use_cache)
    most = model.context if model.position == "learned" else None
    if context is not None:
        check_size("context", context)
        if most is not None and context > most:
            raise bad_value("context", f"at most {most}, the model's learned positions", context)
        most = context
    stops = _checked_stops(stop, model.vocabulary)
    prompts = _checked_prompts(prompts, model.vocabulary)
    return _steps(model, prompts, sampling, max_new_tokens, _generators(seed, len(prompts)), stops, use_cache, most)


def _steps(
    model: GPT,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    count: int,
    generators: Sequence[torch.Generator],
    stops: Sequence[list[int]],
    use_cache: bool,
    most: int | None,
) -> Generator[Tensor, None, None]:
    """The tokens of each step; `most` is how many of a row the model may be shown, None for all."""
    tokens, real = _left_padded(prompts, model.embedding.weight.device)  # (B, N), and which of them are no padding
    writes = torch.ones(len(prompts), dtype=torch.bool)  # the rows that are not finished
    ends: list[list[int]] = [[] for _ in prompts]  # what each row has written
    cache, held = model.new_cache() if use_cache else None, 0
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(len(prompts), model.vocabulary, dtype=torch.bool, device=tokens.device)
        for row, prompt in zip(seen, prompts, strict=True):
            row[prompt.to(row.device)] = True
    for _ in range(count):
        first = held
        if most is not None and tokens.shape[1] > most:
            # From here on each step shows other tokens at each position: what is cached would not be theirs.
            cache, first = None, tokens.shape[1] - most
        shown, keep = tokens[:, first:], real[:, first:]
        with torch.no_grad(), _evaluating(model):
            logits = model(shown, cache=cache, keep=None if bool(keep.all()) else keep, last=True)[:, -1]
            chosen = sampling.choose(logits, seen, generators)
        held = 0 if cache is None else tokens.shape[1]
        new = chosen.to(tokens.device)[:, None]  # finished rows go on too, unseen: the batch stays as it is
        tokens, real = torch.cat([tokens, new], 1), torch.cat([real, torch.ones_like(real[:, :1])], 1)
        if seen is not None:
            seen = seen.scatter(1, new, True)
        written = chosen.where(writes, NOTHING)
        for i, token in enumerate(written.tolist()):
            ends[i].append(token)
            if any(ends[i][-len(stop) :] == stop for stop in stops):
                writes[i] = False
        yield written
        if not writes.any():
            return


def row_seed(seed: int, row: int) -> int:
    """By which seed a row of a batch draws: so row `row` alone, by this seed, writes what it writes in the batch."""
    if row == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{row}".encode()).digest()[:8], "little") >> 1


def _generators(seed: int | None, rows: int) -> list[torch.Generator]:
    generators = [torch.Generator() for _ in range(rows)]
    for row, generator in enumerate(generators):
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(row_seed(seed, row))
    return generators


def _left_padded(prompts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor (B, L) with padding in front, and which of its tokens are none."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    real = torch.zeros_like(tokens, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        tokens[i, longest - len(prompt) :] = prompt
        real[i, longest - len(prompt) :] = True
    return tokens, real


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A model in eval mode; afterwards each of its modules is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _checked_prompts(prompts: object, vocabulary: int) -> list[Tensor]:
    if not isinstance(prompts, list | tuple):
        raise bad_type("prompts", "a list of int64 tensors (L,)", prompts, "", "For one prompt pass [prompt].")
    if not prompts:
        raise bad_value("prompts", "at least one", "none")
    for i, prompt in enumerate(prompts):
        name = f"prompts[{i}]"
        if not isinstance(prompt, Tensor) or prompt.dtype != torch.int64:
            raise bad_type(name, "an int64 tensor (L,)", prompt)
        if prompt.ndim != 1 or not len(prompt):
            raise bad_value(name, "the shape (L,), L at least 1", describe(prompt), "A model goes on from something.")
        _check_tokens(name, prompt.tolist(), vocabulary)
    return list(prompts)


def _checked_stops(stop: object, vocabulary: int) -> list[list[int]]:
    if stop is None:
        return []
    form = "a list of token sequences, such as [[0], [13, 10]]"
    if not isinstance(stop, list | tuple):
        raise bad_type("stop", f"{form}, or None", stop)
    for i, tokens in enumerate(stop):
        if not isinstance(tokens, list | tuple) or not all(is_int(token) for token in tokens):
            raise bad_type(f"stop[{i}]", f"a list of ints, as stop is {form}", tokens)
        if not tokens:
            raise bad_value(f"stop[{i}]", "at least one token", "none", "It would stop before the first.")
        _check_tokens(f"stop[{i}]", tokens, vocabulary)
    return [list(tokens) for tokens in stop]


def _check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    strange = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise bad_value(name, f"tokens from 0 to {vocabulary - 1}, the vocabulary's", strange)
