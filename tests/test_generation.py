"""Generation: what may be drawn, that caches and neighbours change nothing, where it ends, what it refuses."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead.models.generation import NOTHING, generate, row_seed, stream
from multihead.models.gpt import GPT
from multihead.models.sampling import draw, keep_min_p, keep_top_k, keep_top_p, penalise_repetition
from multihead.models.stops import StopStrings

V = 29
INF = math.inf
LEARNED = {"position": "learned", "context": 12}


def logits_of(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def kept(logits: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


# What may be drawn ----------------------------------------------------------------------------------------------------


def test_top_k_by_hand():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [5.0, -1.0, 5.0, 0.0]])
    assert keep_top_k(logits, 2).tolist() == [[-INF, 4.0, -INF, 3.0], [5.0, -INF, 5.0, -INF]]
    assert torch.equal(keep_top_k(logits, 4), logits)
    assert torch.equal(keep_top_k(logits, 100), logits)
    assert kept(keep_top_k(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), 2)) == [[0, 1, 2]]  # as likely as the second


def test_top_p_by_hand():
    logits = logits_of([0.1, 0.4, 0.2, 0.3], [0.85, 0.05, 0.05, 0.05])
    assert kept(keep_top_p(logits, 0.39)) == [[1], [0]]
    assert kept(keep_top_p(logits, 0.41)) == [[1, 3], [0]]
    assert kept(keep_top_p(logits, 0.69)) == [[1, 3], [0]]
    assert kept(keep_top_p(logits, 0.86)) == [[1, 2, 3], [0, 1]]  # of equals the first
    assert kept(keep_top_p(logits, 1.0)) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(keep_top_p(logits, 1e-9)) == [[1], [0]]
    held = keep_top_p(logits, 0.41)
    assert torch.equal(held[held.isfinite()], logits[held.isfinite()])


def test_top_p_of_a_large_vocabulary():
    logits = torch.zeros(1, 2**18)
    logits[0, : 2**17] = 20.0  # the other half, 2e-9 of the probability in all, is lost in sums of float32
    assert kept(keep_top_p(logits, 1.0)) == [list(range(2**18))]
    assert keep_top_p(logits, 1 - 1e-9).isfinite().sum().item() == pytest.approx(1.5 * 2**17, rel=0.1)


def test_min_p_by_hand():
    logits = logits_of([0.1, 0.4, 0.2, 0.3], [0.85, 0.05, 0.05, 0.05])
    assert kept(keep_min_p(logits, 0.49)) == [[1, 2, 3], [0]]
    assert kept(keep_min_p(logits, 0.51)) == [[1, 3], [0]]
    assert kept(keep_min_p(logits, 0.05)) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(keep_min_p(logits, 1.0)) == [[1], [0]]


def test_the_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0], [2.0, -2.0, 1.0, -1.0]])
    seen = torch.tensor([[True, True, False, True], [False, False, True, True]])
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0, 0.0], [2.0, -2.0, 0.5, -2.0]]
    assert torch.equal(penalise_repetition(logits, seen, 1.0), logits)


@pytest.mark.parametrize("seed", range(20))
def test_properties_of_what_is_kept(seed: int):
    torch.manual_seed(seed)
    logits, p, k = 3 * torch.randn(5, 17), float(torch.rand(())), int(torch.randint(1, 17, ()))
    probabilities = logits.softmax(-1)
    for held in (keep_top_k(logits, k), keep_top_p(logits, p), keep_min_p(logits, p)):
        mask = held.isfinite()
        assert torch.equal(held[mask], logits[mask])
        assert mask.gather(1, logits.argmax(-1, keepdim=True)).all()  # the likeliest always
        least = logits.where(mask, INF).amin(-1, keepdim=True)
        assert (mask == (logits >= least)).all()  # nothing likelier than something kept is left out
    assert (keep_top_k(logits, k).isfinite().sum(-1) == k).all()
    nucleus = keep_top_p(logits, p).isfinite()
    share = probabilities.where(nucleus, 0).sum(-1)
    assert (share >= p - 1e-5).all()
    assert (share - probabilities.where(nucleus, INF).amin(-1) < p).all()  # one less would not do
    floor = p * probabilities.amax(-1, keepdim=True)
    assert (probabilities.where(keep_min_p(logits, p).isfinite(), INF) >= floor - 1e-6).all()
    # Each row for itself.
    assert torch.equal(keep_top_p(logits, p)[2:3], keep_top_p(logits[2:3], p))


def test_draws_where_the_sum_passes():
    logits = logits_of([0.25, 0.0, 0.5, 0.25])
    at = {0.0: 0, 0.2499: 0, 0.2501: 2, 0.7499: 2, 0.7501: 3, 1 - 2**-53: 3}
    for uniform, token in at.items():
        assert draw(logits, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]
    ends = logits_of([0.0, 0.3, 0.7, 0.0])  # nothing of probability 0, at the ends neither
    assert draw(ends.expand(2, 4), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_draws_by_the_probabilities():
    logits, n = logits_of([0.1, 0.4, 0.2, 0.3]), 4000
    uniforms = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits.expand(n, 4), uniforms).bincount(minlength=4) / n
    torch.testing.assert_close(drawn.double(), logits.exp()[0], atol=0.03, rtol=0)


class Fixed(GPT):
    """A model whose logits do not depend on anything; it keeps what it was shown."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits.shape[-1], 8, 1, 2)
        self.logits, self.shown = logits, []

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        self.shown.append(tokens)
        return self.logits.expand(len(tokens), 1, -1)


def can_write(probabilities: list[float], prompt: int = 0, **options: Any) -> set[int]:
    """The tokens that 60 rows write first."""
    model = Fixed(logits_of(probabilities))
    return {int(row) for row in generate(model, [torch.tensor([prompt])] * 60, max_new_tokens=1, seed=1, **options)}


def test_options_act_in_their_order():
    even = [0.1, 0.4, 0.2, 0.3]
    assert can_write(even) == {0, 1, 2, 3}
    assert can_write(even, top_k=2) == {1, 3}
    assert can_write(even, top_p=0.5) == {1, 3}
    assert can_write(even, min_p=0.6) == {1, 3}
    assert can_write(even, temperature=0) == {1}
    # The temperature comes before top_p: squared, 0.16 and 0.09 of 0.3 are more than four fifths.
    assert can_write(even, top_p=0.85) == {1, 2, 3}
    assert can_write(even, top_p=0.8, temperature=0.5) == {1, 3}
    # top_k before top_p: of the two that are left the first has 4/7.
    assert can_write(even, top_k=2, top_p=0.55) == {1}
    # The temperature before min_p: squared, 0.2 is a quarter of 0.4.
    assert can_write(even, min_p=0.3) == {1, 2, 3}
    assert can_write(even, min_p=0.3, temperature=0.5) == {1, 3}
    # The penalty before the temperature, in greedy choice too: log 0.4 times 2 is less than log 0.3.
    assert can_write(even, prompt=1, repetition_penalty=2.0, temperature=0) == {3}


def test_the_penalty_sees_prompt_and_written_alike():
    model = Fixed(torch.tensor([5.0, 4.0, 3.0, 2.0]))
    written = generate(model, [torch.tensor([0, 0])], max_new_tokens=3, temperature=0, repetition_penalty=100.0)
    assert written[0].tolist() == [1, 2, 3]
    # Rows see what they hold themselves, and no padding.
    rows = [torch.tensor([1]), torch.tensor([0, 1, 2])]
    written = generate(model, rows, max_new_tokens=1, temperature=0, repetition_penalty=100.0)
    assert [row.tolist() for row in written] == [[0], [3]]


# Caches, neighbours, windows ------------------------------------------------------------------------------------------


def made(**options: Any) -> GPT:
    torch.manual_seed(5)
    return GPT(V, 16, 2, 4, tied=False, **options).double()  # a tied one would say the same again and again


def some_prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(V, (n,), generator=generator) for n in lengths]


def as_lists(rows: list[Tensor]) -> list[list[int]]:
    return [row.tolist() for row in rows]


by_both = pytest.mark.parametrize("options", [{}, LEARNED], ids=["rotary", "learned"])
SAMPLED = {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 7}
by_choice = pytest.mark.parametrize("how", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])


@by_both
def test_greedy_is_the_likeliest_each_time(options: dict[str, Any]):
    model, prompts = made(**options), some_prompts(3, 1)
    for prompt, row in zip(prompts, generate(model, prompts, max_new_tokens=7, temperature=0), strict=True):
        whole = torch.cat([prompt, row])
        assert row.tolist() == model(whole[None])[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@by_both
@by_choice
@pytest.mark.parametrize("context", [None, 5])
def test_cache_and_neighbours_change_nothing(options: dict[str, Any], how: dict[str, Any], context: int | None):
    model, prompts = made(**options), some_prompts(3, 8, 1, 5, 3)
    free = as_lists(generate(model, prompts, max_new_tokens=30, context=context, **how))
    stops = [free[1][14:15], free[2][20:22]]

    def written(prompts: list[Tensor], **more: Any) -> list[list[int]]:
        # 30 tokens: more than there are learned positions
        return as_lists(generate(model, prompts, max_new_tokens=30, stop=stops, context=context, **(how | more)))

    together = written(prompts)
    assert len({len(row) for row in together}) > 1  # some met a stop
    assert written(prompts, use_cache=False) == together
    for i, prompt in enumerate(prompts):
        alone = {"seed": row_seed(7, i)} if "seed" in how else {}
        assert written([prompt], **alone) == [together[i]]
    if "seed" not in how:
        assert written(prompts[::-1]) == together[::-1]


@by_both
def test_reads_no_more_than_the_context(options: dict[str, Any]):
    model, prompts = made(**options), some_prompts(5, 2)

    def by(context: int, prompt: Tensor, written: Tensor) -> list[int]:
        whole = torch.cat([prompt, written])
        ends = range(len(prompt), len(whole))
        return [model(whole[None, max(0, i - context) : i])[0, -1].argmax().item() for i in ends]

    for use_cache in (True, False):
        rows = generate(model, prompts, max_new_tokens=20, temperature=0, context=3, use_cache=use_cache)
        for prompt, row in zip(prompts, rows, strict=True):
            assert row.tolist() == by(3, prompt, row)
    if not options:
        assert any(by(3, prompt, row) != by(99, prompt, row) for prompt, row in zip(prompts, rows, strict=True))


def test_learned_positions_end_and_the_window_moves_on():
    model, prompts = made(**LEARNED), some_prompts(20)  # the prompt alone is longer than the 12 positions
    row = generate(model, prompts, max_new_tokens=5, temperature=0)[0]
    whole = torch.cat([prompts[0], row])
    assert row.tolist() == [model(whole[None, i - 12 : i])[0, -1].argmax().item() for i in range(20, 25)]


def test_with_a_cache_each_token_is_read_once(monkeypatch: pytest.MonkeyPatch):
    model, shown = made(), []
    inner = GPT.forward

    def forward(self: GPT, tokens: Tensor, **options: Any) -> Tensor:
        shown.append(tokens.shape)
        assert not torch.is_grad_enabled()
        return inner(self, tokens, **options)

    monkeypatch.setattr(GPT, "forward", forward)
    generate(model, some_prompts(4, 2), max_new_tokens=4)
    assert shown == [(2, 4), (2, 1), (2, 1), (2, 1)]
    shown.clear()
    generate(model, some_prompts(4, 2), max_new_tokens=3, use_cache=False)
    assert shown == [(2, 4), (2, 5), (2, 6)]


def test_seeds():
    model, prompts = made(), some_prompts(3) * 4

    def written(seed: int | None) -> list[list[int]]:
        return as_lists(generate(model, prompts, max_new_tokens=8, seed=seed))

    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert written(3) == written(3) != written(4)
    assert len({tuple(row) for row in written(3)}) == 4  # rows of one prompt differ
    assert written(None) != written(None)
    assert torch.equal(torch.get_rng_state(), before)
    seeds = [row_seed(seed, row) for seed in range(50) for row in range(20)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_half_precision():
    model, prompts = made().bfloat16(), some_prompts(3, 5)
    assert [len(row) for row in generate(model, prompts, max_new_tokens=6, seed=1)] == [6, 6]
    # Its logits are float32 from here on: what may be drawn, and what is.
    torch.manual_seed(0)
    logits, rows = 2 * torch.randn(1, 300).bfloat16(), 60
    written = generate(
        Fixed(logits[0]), [torch.tensor([0])] * rows, max_new_tokens=1, temperature=0.7, top_p=0.9, seed=1
    )
    uniforms = [
        torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(row_seed(1, row)))
        for row in range(rows)
    ]
    expected = draw(keep_top_p(logits.float() / 0.7, 0.9).expand(rows, -1), torch.cat(uniforms))
    assert torch.equal(torch.cat(written), expected)


# Where it ends --------------------------------------------------------------------------------------------------------


def test_a_stop_ends_its_row_alone():
    model, prompts = made(), some_prompts(3, 1, 6)
    free = as_lists(generate(model, prompts, max_new_tokens=12, temperature=0))
    stop = [free[1][3:5], free[2][7:8]]

    def cut(row: list[int]) -> list[int]:
        ends = [n for n in range(1, 13) if any(row[:n][-len(tokens) :] == tokens for tokens in stop)]
        return row[: min(ends, default=12)]

    written = as_lists(generate(model, prompts, max_new_tokens=12, temperature=0, stop=stop))
    assert written == [cut(row) for row in free]
    assert any(len(row) < 12 for row in written)


def test_a_stop_of_the_prompt_does_not_count():
    model = Fixed(torch.tensor([0.0, 1.0, 0.0]))
    assert as_lists(generate(model, [torch.tensor([1])], max_new_tokens=5, stop=[[1, 1]], temperature=0)) == [[1, 1]]


def test_a_stream_gives_each_step():
    model, prompts = made(), some_prompts(3, 1)
    expected = as_lists(generate(model, prompts, max_new_tokens=12, temperature=0))
    stop = [expected[0][:3]]
    steps = list(stream(model, prompts, max_new_tokens=12, temperature=0, stop=stop))
    rows = as_lists(generate(model, prompts, max_new_tokens=12, temperature=0, stop=stop))
    assert len(rows[0]) < len(rows[1]) == len(steps)
    for i, row in enumerate(rows):
        assert [int(step[i]) for step in steps] == row + [NOTHING] * (len(steps) - len(row))


def test_a_stream_computes_no_more_than_it_is_asked_for():
    model = Fixed(torch.zeros(3))
    steps = stream(model, [torch.tensor([1])], max_new_tokens=1000)
    assert not model.shown
    next(steps)
    next(steps)
    assert len(model.shown) == 2


def test_the_model_is_left_as_it_was():
    model = made(dropout=0.5)
    model.blocks[0].eval()
    model.blocks[1].attn.train()
    modes = [module.training for module in model.modules()]
    prompt = some_prompts(3)
    first = as_lists(generate(model, prompt, max_new_tokens=9, temperature=0))
    assert [module.training for module in model.modules()] == modes
    assert as_lists(generate(model.eval(), prompt, max_new_tokens=9, temperature=0)) == first  # without dropout
    steps = stream(model.train(), prompt, max_new_tokens=9)
    next(steps)
    assert model.training  # between the steps too
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


# Text -----------------------------------------------------------------------------------------------------------------


def told(strings: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stop = StopStrings(strings)
    shown = [stop.feed(piece) for piece in pieces]
    met = stop.met
    return [*shown, stop.finish()], met


def test_stop_strings_by_hand():
    assert told(["END"], ["abc E", "N", "D and more", "x"]) == (["abc ", "", "", "", ""], True)
    assert told(["END"], ["abc E", "N", "d", "E"]) == (["abc ", "", "ENd", "", "E"], False)
    assert told(["aab"], ["aaa", "b"]) == (["a", "", ""], True)
    assert told(["\nUser:", "\n\n"], ["Hi.\n", "U", "\n", "\n"]) == (["Hi.", "", "\nU", "", ""], True)
    assert told(["bc", "abcd"], ["xabcd"]) == (["xa", ""], True)  # "bc" is complete first
    assert told(["bcd", "abcd"], ["xab", "cd"]) == (["x", "", ""], True)  # at once: the longer
    assert told([], ["a", "b"]) == (["a", "b", ""], False)


ALPHABET = st.text("ab", max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(ALPHABET, max_size=6))
@example(["ab", "b"], ["a", "b"])
def test_pieces_do_not_matter(strings: list[str], pieces: list[str]):
    whole = "".join(pieces)
    ends = [n for n in range(len(whole) + 1) if any(whole[:n].endswith(string) for string in strings)]
    expected = whole
    if ends:
        expected = whole[: ends[0] - max(len(string) for string in strings if whole[: ends[0]].endswith(string))]
    stop, shown, come = StopStrings(strings), "", ""
    for piece in pieces:
        shown, come = shown + stop.feed(piece), come + piece
        assert expected.startswith(shown)
        held = len(come) - len(shown)
        if not stop.met:  # no more is held back than may be a beginning
            assert held == max(n for n in range(5) if n <= len(come) and _begins(come[len(come) - n :], strings))
    assert stop.met == bool(ends)
    assert shown + stop.finish() == expected


def _begins(text: str, strings: list[str]) -> bool:
    return not text or any(string.startswith(text) for string in strings)


# What it refuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0."),
        ({"temperature": -1}, "temperature: expected 0, or a number from 1e-05 to 1e+09, got -1."),
        ({"temperature": math.nan}, "temperature: expected 0, or a number from 1e-05 to 1e+09, got nan."),
        ({"temperature": INF}, "temperature: expected 0, or a number from 1e-05 to 1e+09, got inf."),
        ({"temperature": 10**400}, "temperature: expected 0, or a number from 1e-05 to 1e+09, got 1000"),
        ({"top_k": 0}, "top_k: expected at least 1, got 0."),
        ({"top_p": 0}, "top_p: expected a number above 0 and at most 1, got 0."),
        ({"top_p": 1.01}, "top_p: expected a number above 0 and at most 1, got 1.01."),
        ({"min_p": -0.1}, "min_p: expected a number from 0 to 1, got -0.1."),
        ({"min_p": 2}, "min_p: expected a number from 0 to 1, got 2."),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number from 1e-05 to 1e+09, got 0."),
        ({"repetition_penalty": 1e-40}, "repetition_penalty: expected a number from 1e-05 to 1e+09, got 1e-40."),
        ({"repetition_penalty": 1e39}, "repetition_penalty: expected a number from 1e-05 to 1e+09, got 1e+39."),
        ({"seed": -1}, "seed: expected None or an int from 0 to 2^63 - 1, got -1."),
        ({"seed": 2**63}, "seed: expected None or an int from 0 to 2^63 - 1, got 9223372036854775808."),
        ({"context": 0}, "context: expected at least 1, got 0."),
        ({"context": 13}, "context: expected at most 12, the model's learned positions, got 13."),
        ({"stop": [[]]}, "stop[0]: expected at least one token, got none."),
        ({"stop": [[1], [29]]}, "stop[1]: expected tokens from 0 to 28, the vocabulary's, got 29."),
        ({"prompts": []}, "prompts: expected at least one, got none."),
        ({"prompts": [torch.tensor([1]), torch.zeros(0).long()]}, "prompts[1]: expected the shape (L,), L at least 1"),
        ({"prompts": [torch.tensor([[1]])]}, "prompts[0]: expected the shape (L,), L at least 1, got a int64 tensor"),
        ({"prompts": [torch.tensor([3, 29])]}, "prompts[0]: expected tokens from 0 to 28, the vocabulary's, got 29."),
    ],
)
def test_refuses_bad_values_before_any_work(options: dict[str, Any], told: str):
    model = made(**LEARNED)
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        stream(model, **({"prompts": some_prompts(3), "max_new_tokens": 5} | options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"prompts": torch.tensor([1, 2])},
            "prompts: expected a list of int64 tensors (L,), got a int64 tensor of shape",
        ),
        ({"prompts": [[1, 2]]}, "prompts[0]: expected an int64 tensor (L,), got an object of type list."),
        (
            {"prompts": [torch.ones(3)]},
            "prompts[0]: expected an int64 tensor (L,), got a float32 tensor of shape (3,).",
        ),
        ({"temperature": "hot"}, "temperature: expected a number, got hot."),
        ({"top_k": 2.0}, "top_k: expected an int, got 2.0."),
        ({"use_cache": 1}, "use_cache: expected True or False, got 1."),
        ({"stop": [3]}, "stop[0]: expected a list of ints, as stop is a list of token sequences"),
        ({"stop": "end"}, "stop: expected a list of token sequences, such as [[0], [13, 10]], or None, got end."),
    ],
)
def test_refuses_wrong_types(options: dict[str, Any], told: str):
    with pytest.raises(TypeError, match=f"^{re.escape(told)}"):
        stream(made(), **({"prompts": some_prompts(3), "max_new_tokens": 5} | options))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_that_has_diverged_is_said_to(temperature: float):
    model = made()
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="model: expected one that gives finite logits, got NaN or infinity"):
        generate(model, some_prompts(3), max_new_tokens=5, temperature=temperature)
    assert [module.training for module in model.modules()] == modes
    assert model.training


def test_refuses_stop_strings_that_are_none():
    with pytest.raises(ValueError, match="strings: expected no empty string, got ''"):
        StopStrings(["a", ""])
    with pytest.raises(TypeError, match="strings: expected a list of strings, got end"):
        StopStrings("end")  # type: ignore[arg-type]
