"""The native kernel in programs that PyTorch records: compiled, exported, traced by make_fx; and under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import multihead as mh
from multihead.kernels import library
from multihead.kernels.native_shapes import GRAD_BIAS, GRAD_KV, GRAD_Q
from native_calls import OPTIONS, B, D, H, K, L, S, bf16, close, compiled_function, f32, leaves, loss, native

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")


# Programs -------------------------------------------------------------------------------------------------------------


@compiled_function
@pytest.mark.parametrize("name", ["plain", "learned bias", "alibi, positions"])
def test_compiled_whole(name):
    """One graph forward and one backward, with the same bits."""
    more, options = OPTIONS[name]
    given = leaves(*more)
    torch.compiler.reset()
    compiled = torch.compile(lambda **t: native(t, **options), fullgraph=True, backend="aot_eager")
    answers = []
    for function in (compiled, lambda **t: native(t, **options)):
        out, lse = function(**given)
        answers.append([out, lse, *torch.autograd.grad(loss(out, lse), list(given.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@compiled_function
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_compiled_with_masks_that_are_inputs_and_dropout(dtype):
    torch.compiler.reset()
    given = leaves("bias", dtype=dtype)
    keep, ids, n, at = torch.rand(B, S) < 0.7, torch.arange(S) // 4, torch.tensor([9, 4]), torch.randperm(S)

    def attend(given, keep, ids, n, at):
        mask = mh.causal() & mh.padding(keep) | mh.documents(ids.int()) & mh.lengths(n)
        return native(given, mask=mask, dropout=0.3, q_positions=at[:L], k_positions=at)

    answers = []
    for function in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend):
        torch.manual_seed(3)
        out, lse = function(given, keep, ids, n, at)
        answers.append([out, lse, *torch.autograd.grad(loss(out, lse), list(given.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


class Graphs:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.number += 1
        return graph.forward


@compiled_function
@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "recorded"])
@pytest.mark.parametrize("name", ["alibi"])
def test_few_graphs_over_many_lengths(name, recorded):
    torch.compiler.reset()
    graphs, (_, options) = Graphs(), OPTIONS[name]
    compiled = torch.compile(lambda t: native(t, **options), fullgraph=True, backend=graphs)
    for length, keys in ((5, 11), (7, 13), (1, 70), (65, 193), (6, 6)):
        given = leaves(length=length, keys=keys)
        with torch.set_grad_enabled(recorded):
            assert all(torch.equal(a, b) for a, b in zip(compiled(given), native(given, **options), strict=True))
    assert graphs.number <= 3


@compiled_function
def test_dynamic_lengths_forward_and_backward():
    torch.compiler.reset()

    def attend(given: dict[str, Tensor], keep: Tensor) -> Tensor:
        return mh.attention(**given, mask=mh.causal() & mh.padding(keep), kernel="native")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for length, keys in ((5, 11), (7, 13), (65, 193)):
        given, keep = leaves("bias", length=length, keys=keys), torch.rand(B, keys) < 0.7
        for tensor, axes in (
            (given["q"], [2]),
            (given["k"], [2]),
            (given["v"], [2]),
            (given["bias"], [1, 2]),
            (keep, [1]),
        ):
            torch._dynamo.mark_dynamic(tensor, axes)
        answers = []
        for function in (compiled, attend):
            out = function(given, keep)
            answers.append([out, *torch.autograd.grad(out.sin().sum(), list(given.values()))])
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = mh.causal() & mh.padding(keep) | mh.window(left=1, right=0)
        return mh.attention(q, k, v, mask, bias=mh.ALiBi(H), softcap=9.0, kernel="native")


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "recorded"])
def test_exported_with_any_batch_and_lengths(recorded):
    def inputs(batch, length, keys):
        torch.manual_seed(length)
        q, k, v = (torch.randn(batch, h, n, D) for h, n in ((H, length), (K, keys), (K, keys)))
        return q, k, v, torch.rand(batch, keys) < 0.7

    rows, queries, keys = (torch.export.Dim(letter, min=2, max=4096) for letter in "BLS")
    dims = {"q": {0: rows, 2: queries}, "k": {0: rows, 2: keys}, "v": {0: rows, 2: keys}, "keep": {0: rows, 1: keys}}
    with torch.set_grad_enabled(recorded):
        program = torch.export.export(Model(), inputs(3, 7, 13), dynamic_shapes=dims)
        assert any("multihead.forward" in str(node.target) for node in program.graph.nodes)
        for sizes in ((3, 7, 13), (2, 5, 11), (5, 67, 71), (2, 131, 300)):
            assert torch.equal(program.module()(*inputs(*sizes)), Model()(*inputs(*sizes)))


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(pre_dispatch):
    given = {name: t.detach() for name, t in leaves("bias").items()}

    def attend(*t: Tensor) -> tuple[Tensor, Tensor]:
        return native(dict(zip(given, t, strict=True)), mask=mh.causal())

    graph = make_fx(attend, pre_dispatch=pre_dispatch)(*given.values())
    found = graph(*(t + 1 for t in given.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, attend(*(t + 1 for t in given.values())), strict=True))

    def slopes(*t: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in t]
        return torch.autograd.grad(loss(*attend(*inputs)), inputs)

    if not pre_dispatch:
        graph = make_fx(slopes)(*given.values())
        assert any("multihead.backward" in str(node.target) for node in graph.graph.nodes)
        assert all(torch.equal(a, b) for a, b in zip(graph(*given.values()), slopes(*given.values()), strict=True))


def arguments(dtype: torch.dtype, full: bool, tokens_first: bool = False) -> tuple[Any, ...]:
    """Of `forward`, without its last."""
    q, k, v, bias = (t.detach() for t in leaves("bias", dtype=dtype).values())
    if tokens_first:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    if not full:
        return (q, k, v, None, None, None, None, [], [], 0.3, 0.0, 0.0, None, None)
    tables = [torch.rand(B, S) < 0.9, torch.arange(S) // 4, torch.rand(L, S) < 0.9, torch.tensor([9, 4])]
    steps = [0, 2**63 - 1, 0, 3, 0, 6, 4, 1, -1, 7, 5, 2, 6, 1, 3, 0, 7, 2, -1, 3, 8, 7]
    at = torch.arange(L) + 6, torch.arange(S)
    return (q, k, v, bias[None], torch.rand(H), *at, steps, tables, 0.3, 2.0, 0.2, torch.tensor(7), -9.0)


SLOW = ("test_autograd_registration", "test_aot_dispatch_dynamic")  # about a second each


@pytest.mark.parametrize("tokens_first", [False, True], ids=["", "tokens first"])
@pytest.mark.parametrize("full", [False, True], ids=["least", "all arguments"])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_opcheck(dtype, full, tokens_first):
    given = arguments(dtype, full, tokens_first)
    checks = ("test_schema", "test_faketensor", *(SLOW if full and tokens_first else ()))
    for last in (False, True):
        torch.library.opcheck(torch.ops.multihead.forward.default, (*given, last), test_utils=checks)
    out, lse, state, rest = torch.ops.multihead.forward(*given, True)
    above = (torch.rand_like(out), torch.rand_like(lse), out, None if dtype == f32 else rest, state)
    every = GRAD_Q | GRAD_KV | (GRAD_BIAS if full else 0)
    torch.library.opcheck(torch.ops.multihead.backward.default, (*above, *given, every), test_utils=checks)
    above = (above[0], None, *above[2:])
    for wanted in (GRAD_Q | GRAD_KV, GRAD_Q, GRAD_KV, 0):  # the first is the default, which is not passed on
        torch.library.opcheck(torch.ops.multihead.backward.default, (*above, *given, wanted), test_utils=checks[:2])
    for average in (False, True):
        torch.library.opcheck(torch.ops.multihead.weights.default, (state, *given, average), test_utils=checks[:2])


SHAPES = [
    (2, 4, 2, 5, 11, 8, 6),
    (0, 4, 2, 5, 11, 8, 6),
    (2, 4, 2, 0, 11, 8, 6),
    (2, 4, 2, 5, 0, 8, 6),
    (2, 4, 2, 5, 11, 8, 0),
]
SHAPES += [(1, 1, 1, 1, 1, 1, 1), (2, 1, 1, 5, 11, 8, 6), (1, 4, 4, 1, 11, 8, 6), (2, 4, 1, 1, 1, 1, 1)]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shapes_and_strides_are_what_compiled_programs_are_told(sizes):
    """Of tensors without numbers; also of empty ones, and of those that have one head or one token."""
    B, H, K, L, S, D, V = sizes
    for dtype in (f32, bf16):
        for layout in ("plain", "tokens first", "spread"):
            made = [torch.zeros(s, dtype=dtype) for s in ((B, H, L, D), (B, K, S, D), (B, K, S, V), (1, H, 1, S))]
            if layout == "tokens first":
                made[:3] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made[:3]]
            if layout == "spread":
                made[:3] = [torch.zeros(1, dtype=dtype).expand(t.shape) for t in made[:3]]
            rest, every = (None, None, None, [], [], 1.0, 0.0, 0.0, None, None), GRAD_Q | GRAD_KV | GRAD_BIAS
            found = list(torch.ops.multihead.forward(*made, *rest, True))
            kept = None if dtype == f32 else found[3]
            above = (torch.zeros_like(found[0]), None, found[0], kept, found[2])
            found += torch.ops.multihead.backward(*above, *made, *rest, every)
            with FakeTensorMode() as mode:
                fake = [mode.from_tensor(t) for t in made]
                told = list(torch.ops.multihead.forward(*fake, *rest, True))
                above = (torch.zeros_like(told[0]), None, told[0], None if dtype == f32 else told[3], told[2])
                told += torch.ops.multihead.backward(*above, *fake, *rest, every)
            for number, (have, want) in enumerate(zip(told, found, strict=True)):
                assert have.shape == want.shape, f"{layout}: {number}"
                assert have.dtype == want.dtype, f"{layout}: {number}"
                counts = [size > 1 and want.numel() > 0 for size in want.shape]  # the others are never walked along
                strides = [tuple(step for step, c in zip(t.stride(), counts, strict=True) if c) for t in (have, want)]
                assert strides[0] == strides[1], f"{layout}: {number}"


# Autocast, modes of autograd ------------------------------------------------------------------------------------------


def test_autocast():
    given = leaves("bias", "sinks")
    with torch.autocast("cpu", bf16):
        out, lse = native(given, mask=mh.causal())
        inside = torch.autograd.grad(loss(out, lse), list(given.values()), retain_graph=True)
    assert out.dtype == bf16
    assert lse.dtype == f32
    assert all(grad.dtype == f32 for grad in inside)
    outside = torch.autograd.grad(loss(out, lse), list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    close([out], [native(given, mask=mh.causal())[0]], off=2e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    given = leaves("bias", "sinks")
    recorded = native(given, mask=mh.causal())
    with mode():
        found = native(given, mask=mh.causal())
    assert not any(t.requires_grad for t in found)
    assert all(t.is_inference() == (mode is torch.inference_mode) for t in found)
    assert all(torch.equal(a, b) for a, b in zip(found, recorded, strict=True))


def test_deterministic_algorithms():
    given = leaves("bias")
    torch.use_deterministic_algorithms(True)
    try:
        out, lse = native(given, mask=mh.lengths([9, 0]), dropout=0.2)
        grads = torch.autograd.grad(loss(out, lse), list(given.values()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in (out, *grads))
