"""What PyTorch does to functions, done to `attention`: derivatives of every order and mode, vmap, compile, export,
autocast, dropout, threads, hooks, and the memory that is taken on the way."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import multihead as mh
from cases import NATIVE, Case, assert_within_budget, by_kernel, by_reference, draw, names, own_error
from multihead import reference
from multihead.kernels import library

B, H, K, L, S, D, V = 2, 6, 3, 5, 11, 7, 13
f64 = torch.float64
# PyTorch warns of what it does itself: rules of forward-mode differentiation are made with torch.jit.script,
# and torch.compile makes an instance of each torch.autograd.Function while it looks at it.
compiled_function = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


class Given(NamedTuple):
    """One call: its tensors (q, k, v, and those of options that have a gradient) and the rest."""

    tensors: dict[str, Tensor]
    fixed: dict[str, Any]

    def by(self, kernel: str | None, *tensors: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        named = dict(zip(self.tensors, tensors or self.tensors.values(), strict=True))
        return mh.attention(**named, **self.fixed, **more, kernel=kernel, return_lse=True)

    def by_definition(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(self.tensors, tensors or self.tensors.values(), strict=True))
        found = reference.attention(**named, **self.fixed)
        return found.out, found.lse

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.tensors.values())


def given(
    *more: str,
    seed: int = 1,
    heads: tuple[int, int] = (H, K),
    L: int = L,
    S: int = S,
    V: int | None = None,
    batch: tuple[int, ...] = (B,),
    dtype: torch.dtype = f64,
    **fixed: Any,
) -> Given:
    """q, k, v and, of "bias" and "sinks", what `more` names, all with gradients."""
    torch.manual_seed(seed)
    V = D if V is None else V
    shapes = {"q": (*batch, heads[0], L, D), "k": (*batch, heads[1], S, D), "v": (*batch, heads[1], S, V)}
    shapes |= {"bias": (heads[0], L, S), "sinks": (heads[0],)}
    wanted = ("q", "k", "v", *more)
    return Given({n: torch.randn(shapes[n], dtype=dtype, requires_grad=True) for n in wanted}, fixed)


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """out, and lse with 0 for the rows that see nothing (a difference of infinities is none)."""
    return out, lse.masked_fill(lse == -math.inf, 0.0)


def loss(out: Tensor, lse: Tensor | None = None) -> Tensor:
    """A number that depends on both, or on the first alone, in a curved way."""
    if lse is None:
        return out.sin().square().sum()
    out, lse = finite(out, lse)
    return out.sin().square().sum() + (lse * 0.3).cos().sum()


def close(found: list[Tensor] | tuple[Tensor, ...], exact: list[Tensor] | tuple[Tensor, ...], told: str = "") -> None:
    """Within the error budget of float64."""
    labels = [f"number {i}" for i in range(len(exact))]
    assert_within_budget(list(found), list(exact), None, told, labels)


# Derivatives of derivatives -------------------------------------------------------------------------------------------

SMALL = {"heads": (2, 1), "L": 2, "S": 3, "batch": ()}
TWICE = {
    "plain": ("sdpa blocks", (), {}),
    "square causal": ("sdpa blocks", (), {"S": 2, "mask": mh.causal()}),
    "blind rows": ("sdpa blocks", (), {"mask": mh.dense(torch.tensor([[True, False, True], [False, False, False]]))}),
    "equal heads": ("sdpa blocks", (), {"heads": (2, 2), "mask": mh.causal()}),
    "fixed bias": (
        "sdpa blocks",
        (),
        {"bias": torch.randn(2, 3, dtype=f64, generator=torch.Generator().manual_seed(3))},
    ),
    "sinks": ("sdpa blocks", ("sinks",), {"mask": mh.lengths(2)}),
    "negative scale": ("sdpa blocks", (), {"scale": -0.7}),
    "learned bias": ("blocks", ("bias",), {"mask": mh.causal()}),
    "softcap": ("blocks", (), {"softcap": 0.9}),
    "V != D": ("blocks", (), {"V": 3, "mask": mh.window(left=1)}),
    "all": ("blocks", ("bias", "sinks"), {"V": 3, "softcap": 0.9, "scale": 0.6, "mask": mh.causal() | mh.prefix(1)}),
}
TWICE_BY_KERNEL = [(name, kernel) for name, (kernels, _, _) in TWICE.items() for kernel in kernels.split()]


@pytest.mark.parametrize(("name", "kernel"), TWICE_BY_KERNEL)
def test_second_derivatives_are_those_of_differences(name, kernel):
    _, more, options = TWICE[name]
    call = given(*more, **SMALL | options)

    def function(*tensors):
        return finite(*call.by(kernel, *tensors))

    assert torch.autograd.gradcheck(function, call.leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, call.leaves, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize(("name", "kernel"), TWICE_BY_KERNEL)
def test_three_derivatives_are_those_of_the_reference(name, kernel):
    _, more, options = TWICE[name]
    call = given(*more, **{"L": 3, "S": 5, "batch": (2,), "heads": (4, 2)} | _sized(options, 3, 5))
    answers = []
    for function in (lambda: call.by(kernel), call.by_definition):
        total, orders = loss(*function()), []
        for _ in range(3):
            grads = torch.autograd.grad(total, call.leaves, create_graph=True)
            orders += grads
            total = sum((g * (0.1 * i + 1)).square().sum() for i, g in enumerate(grads))
        answers.append(orders)
    assert all(grad.abs().max() > 1e-9 for grad in answers[1])
    close(*answers, f"{kernel}, {name}")


def _sized(options, L, S):
    """Options for another size: tables are drawn anew, with a blind row where there was one."""
    options = {name: value for name, value in options.items() if name not in ("heads", "S")}
    torch.manual_seed(4)
    if "bias" in options:
        options["bias"] = torch.randn(L, S, dtype=f64)
    if isinstance(options.get("mask"), mh.Mask) and options["mask"].tensors():
        keep = torch.rand(L, S) < 0.6
        keep[1] = False
        options["mask"] = mh.dense(keep)
    return options


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", None])
@pytest.mark.parametrize("mask", [None, mh.causal(), mh.window(left=3, right=0)], ids=repr)
def test_a_gradient_penalty_where_q_k_and_v_are_one_tensor(kernel, mask):
    torch.manual_seed(2)
    x = torch.randn(B, H, S, D, dtype=f64, requires_grad=True)
    answers = []
    for function in (
        lambda x: mh.attention(x, x, x, mask, kernel=kernel),
        lambda x: reference.attention(x, x, x, mask).out,
    ):
        out = function(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().sum()
        answers.append([slope, *torch.autograd.grad(penalty + out.sum(), x)])
    close(*answers)


@pytest.mark.parametrize("name", ["plain", "learned bias", "softcap", "V != D"])
def test_derivatives_with_dropout_are_consistent(name):
    """A gradient that can be differentiated again is the same gradient, of the same dropout."""
    _, more, options = TWICE[name]
    call = given(*more, **{"L": 67, "S": 71} | _sized(options, 67, 71))
    answers = []
    for again in (False, True):
        torch.manual_seed(9)
        out, lse = call.by("blocks", dropout=0.4)
        answers.append([out, lse, *torch.autograd.grad(loss(out, lse), call.leaves, create_graph=again)])
    assert all(grad.requires_grad for grad in answers[1])
    close(answers[1], answers[0])
    torch.manual_seed(10)
    assert not torch.allclose(call.by("blocks", dropout=0.4)[0], answers[0][0])


def test_second_derivatives_with_dropout_are_those_of_differences():
    call = given("bias", **SMALL)

    def function(*tensors):
        torch.manual_seed(3)
        return call.by("blocks", *tensors, dropout=0.5)

    assert 0 < torch.autograd.grad(function(*call.leaves)[0].sum(), call.tensors["v"])[0].count_nonzero() < 3 * D
    assert torch.autograd.gradcheck(function, call.leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, call.leaves, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", None])
@pytest.mark.parametrize("lse_too", [False, True], ids=["out", "out and lse"])
def test_many_gradients_at_once(kernel, lse_too):
    """torch.autograd.grad(is_grads_batched=True), of which jacobian(vectorize=True) is made."""
    call = given(mask=mh.causal())
    out, lse = call.by(kernel)
    outputs = (out, lse) if lse_too else (out,)
    above = [torch.randn(3, *y.shape, dtype=f64) for y in outputs]
    found = torch.autograd.grad(outputs, call.leaves, above, is_grads_batched=True)
    exact = call.by_definition()[: len(outputs)]
    each = [torch.autograd.grad(exact, call.leaves, [a[i] for a in above], retain_graph=True) for i in range(3)]
    close(found, [torch.stack(grads) for grads in zip(*each, strict=True)])


# Forward mode, torch.func ---------------------------------------------------------------------------------------------

CALLS = {
    "plain": ((), {}),
    "causal": ((), {"mask": mh.causal()}),
    "lengths": ((), {"mask": mh.lengths([3, 0])}),
    "window and documents": ((), {"mask": mh.window(left=4) & mh.documents(torch.tensor([0] * 4 + [1] * 7))}),
    "positions": ((), {"mask": mh.causal(), "q_positions": torch.tensor([1, 8, 3, 3, 10])}),
    "bias, sinks": (("bias", "sinks"), {"mask": mh.causal()}),
    "softcap, V != D": ((), {"softcap": 1.5, "V": V}),
    "alibi": ((), {"bias": mh.ALiBi(H), "scale": 0.3}),
}


@forward_mode
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode(name):
    more, options = CALLS[name]
    call = given(*more, **options)
    tangents = tuple(torch.randn_like(x) for x in call.leaves)
    exact = torch.func.jvp(lambda *t: finite(*call.by_definition(*t)), tuple(call.leaves), tangents)
    by_func = torch.func.jvp(lambda *t: finite(*call.by(None, *t)), tuple(call.leaves), tangents)
    close([*by_func[0], *by_func[1]], [*exact[0], *exact[1]])
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x.detach(), t) for x, t in zip(call.leaves, tangents, strict=True)]
        parts = [forward_ad.unpack_dual(y) for y in finite(*call.by(None, *dual))]
    close([p.primal for p in parts] + [p.tangent for p in parts], [*exact[0], *exact[1]])


@forward_mode
@pytest.mark.parametrize("only", ["q", "k", "v", "bias", "sinks"])
def test_forward_mode_by_one_argument(only):
    call = given("bias", "sinks", mask=mh.causal())
    leaves = {name: x.detach() for name, x in call.tensors.items()}
    tangent = torch.randn_like(leaves[only])
    answers = []
    for function in (lambda *t: call.by(None, *t), call.by_definition):
        with forward_ad.dual_level():
            dual = leaves | {only: forward_ad.make_dual(leaves[only], tangent)}
            parts = [forward_ad.unpack_dual(y) for y in function(*dual.values())]
            # v takes no part in lse
            answers.append([p.tangent for p in parts if p.tangent is not None])
    assert len(answers[1]) == (1 if only == "v" else 2)
    close(*answers)


@forward_mode
def test_jacobian_and_hessian():
    q, k, v = given(L=2, S=3, heads=(2, 1), batch=()).leaves

    def own(q):
        return mh.attention(q, k, v, mh.causal())

    def definition(q):
        return reference.attention(q, k, v, mh.causal()).out

    close(
        [torch.func.jacfwd(own)(q), torch.func.jacrev(own)(q), torch.func.hessian(lambda q: own(q).sin().sum())(q)],
        [*[torch.func.jacrev(definition)(q)] * 2, torch.func.hessian(lambda q: definition(q).sin().sum())(q)],
    )
    exact = torch.autograd.functional.hessian(lambda q: definition(q).sin().sum(), q)
    for vectorize in (False, True):
        close([torch.autograd.functional.hessian(lambda q: own(q).sin().sum(), q, vectorize=vectorize)], [exact])
    close([torch.func.hessian(lambda q: own(q).sin().sum())(q)], [exact])


@pytest.mark.parametrize("name", CALLS)
def test_gradients_by_torch_func(name):
    more, options = CALLS[name]
    call = given(*more, **options)
    everything = tuple(range(len(call.leaves)))
    found = torch.func.grad(lambda *t: loss(*call.by(None, *t)), everything)(*call.leaves)
    close(found, torch.autograd.grad(loss(*call.by_definition()), call.leaves))
    out, pull = torch.func.vjp(lambda *t: call.by(None, *t)[0], *call.leaves)
    exact = call.by_definition()[0]
    above = torch.randn_like(exact)
    close([out], [exact])
    vectors = torch.autograd.grad(exact, call.leaves, above, allow_unused=True, materialize_grads=True)
    close(pull(above), vectors)


PER_ROW = {
    "lengths": lambda: (mh.lengths, torch.tensor([3, 0])),
    "prefix": lambda: (lambda n: mh.causal() | mh.prefix(n), torch.tensor([9, 2])),
    "padding": lambda: (mh.padding, torch.rand(B, S) < 0.5),
    "documents": lambda: (mh.documents, torch.randint(0, 3, (B, S))),
    "dense": lambda: (lambda keep: keep, torch.rand(B, L, S) < 0.5),
    "dense by head": lambda: (lambda keep: ~mh.dense(keep), torch.rand(B, H, L, S) < 0.5),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_vmap_over_rows_with_masks_of_their_own(name):
    q, k, v = given().leaves
    torch.manual_seed(5)
    make, rows = PER_ROW[name]()

    def one(q, k, v, row):
        return mh.attention(q, k, v, make(row))

    def slope(q, k, v, row):
        return torch.func.grad(lambda q: one(q, k, v, row).sin().sum())(q)

    loop = [one(q[b], k[b], v[b], rows[b]) for b in range(B)]
    close([torch.vmap(one)(q, k, v, rows)], [torch.stack(loop)])
    slopes = [torch.autograd.grad(y.sin().sum(), q, retain_graph=True)[0][b] for b, y in enumerate(loop)]
    close([torch.vmap(slope)(q, k, v, rows)], [torch.stack(slopes)])


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, None, None), (None, 1, 1), (1, 3, None), (-1, -1, -1)], ids=repr)
def test_vmap_is_a_loop(in_dims):
    N = 3
    torch.manual_seed(6)
    shapes = [(B, H, L, D), (B, K, S, D), (B, K, S, D)]
    one = [torch.randn(N, *shape, dtype=f64) for shape in shapes]
    stacked = [x[0] if at is None else x.movedim(0, at) for x, at in zip(one, in_dims, strict=True)]
    one = [x[:1].expand(x.shape) if at is None else x for x, at in zip(one, in_dims, strict=True)]
    for mask in (None, mh.causal(), mh.lengths([7, 0])):
        found = torch.vmap(lambda *t, mask=mask: mh.attention(*t, mask, return_lse=True), in_dims)(*stacked)
        loop = [mh.attention(*(x[n] for x in one), mask, return_lse=True) for n in range(N)]
        close(found, [torch.stack(t) for t in zip(*loop, strict=True)])


def test_vmap_over_parameters():
    """An ensemble: one input, several layers."""
    layers = [
        mh.Attention(12, 6, num_kv_heads=2, position=mh.Rotary(), sinks=True, qk_norm=True, mask=mh.causal(), dtype=f64)
        for _ in range(3)
    ]
    x = torch.randn(B, S, 12, dtype=f64)
    parameters, buffers = torch.func.stack_module_state(layers)

    def one(parameters, buffers):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))

    found = torch.vmap(one)(parameters, buffers)
    assert (found[0] - found[1]).abs().max() > 1e-3
    close([found], [torch.stack([layer(x) for layer in layers])])
    slopes = torch.vmap(torch.func.grad(lambda *state: one(*state).sin().sum()))(parameters, buffers)
    for n, layer in enumerate(layers):
        exact = torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
        close([slopes[name][n] for name, _ in layer.named_parameters()], exact)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(randomness):
    q = torch.zeros(3, 2, 31, D)
    v = torch.ones(3, 2, 31, D)
    out = torch.vmap(lambda q, v: mh.attention(q, q, v, dropout=0.5), randomness=randomness)(q, v)
    assert torch.allclose(out[0], out[1]) == (randomness == "same")
    assert out.unique().numel() > 3


# Compilation ----------------------------------------------------------------------------------------------------------

ODD = {"k_positions": torch.arange(S) * 2, "q_positions": torch.tensor([3, 9, 0, 40, 7])}
COMPILED = {
    "plain": ((), {}),
    "plain, lse": ((), {"return_lse": True}),
    "square causal": ((), {"mask": mh.causal(), "S": L, "return_lse": True}),
    "one query": ((), {"mask": mh.causal(), "L": 1}),
    "window, sinks": (("sinks",), {"mask": mh.window(left=2, right=3)}),
    "lengths": ((), {"mask": mh.lengths([3, 0]), "return_lse": True}),
    "padding, alibi": ((), {"mask": mh.causal() & mh.padding(torch.arange(S) % 3 > 0), "bias": mh.ALiBi(H)}),
    "documents": ((), {"mask": ~mh.documents(torch.tensor([0, 0, 1, 1, 1, 0, 2, 2, 3, 3, 3]))}),
    "prefix, positions": ((), {"mask": mh.causal() | mh.prefix(torch.tensor([2, 9])), **ODD}),
    "dense, V != D": ((), {"mask": torch.arange(L * S).view(L, S) % 2 == 0, "V": V}),
    "learned bias, softcap": (("bias",), {"softcap": 1.1, "mask": mh.causal(), "return_lse": True}),
}


@compiled_function
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name):
    """One graph, forward and backward."""
    more, options = COMPILED[name]
    call = given(*more, **options)
    torch.compiler.reset()

    def attend(*tensors):
        return mh.attention(**dict(zip(call.tensors, tensors, strict=True)), **call.fixed)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    answers = []
    for function in (compiled, attend):
        found = function(*call.leaves)
        out, lse = found if isinstance(found, tuple) else (found, torch.zeros(1, dtype=f64))
        answers.append([out, lse, *torch.autograd.grad(loss(out, lse), call.leaves)])
    close(*answers)


class Graphs:
    """A backend that counts the graphs it is given, and runs them as they are."""

    def __init__(self):
        self.number = 0

    def __call__(self, graph, _):
        self.number += 1
        return graph.forward


MANY_LENGTHS = {
    "plain": {},
    "causal": {"mask": mh.causal()},
    "window or prefix": {"mask": mh.window(left=3, right=0) | mh.prefix(2), "scale": 0.3},
    "by the formula": {"mask": mh.causal(), "softcap": 2.0},
    "dropout": {"dropout": 1.0},
}


@compiled_function
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", "square"),
        ("causal", "square"),
        ("by the formula", "square"),
        ("causal", "decoding"),
        ("window or prefix", "decoding"),
        ("dropout", "decoding"),
    ],
)
def test_few_graphs_over_many_lengths(name, kind):
    """One for the first length and one for all others, whichever kernel is taken, and whatever the others said."""
    torch.compiler.reset()
    graphs, options = Graphs(), MANY_LENGTHS[name]
    compiled = torch.compile(mh.attention, fullgraph=True, backend=graphs)
    for n in (5, 7, 11, 13):
        call = given(L=n if kind == "square" else 1, S=n)
        with torch.no_grad():
            close([compiled(*call.leaves, **options)], [mh.attention(*call.leaves, **options)])
    assert graphs.number <= 2


LAYERS = {
    "rotary": {"mask": mh.causal(), "position": mh.Rotary(), "num_kv_heads": 2, "sinks": True},
    "t5": {"position": mh.T5Bias(6, dtype=f64), "qk_norm": True, "gate": True},
}


@compiled_function
@pytest.mark.parametrize(("name", "kind"), [("rotary", "encoder-decoder"), ("t5", "self")])
def test_few_graphs_of_the_layer(name, kind):
    torch.compiler.reset()
    torch.manual_seed(1)
    layer, graphs = mh.Attention(12, 6, dtype=f64, **LAYERS[name]), Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for n, m in ((5, 11), (7, 13), (11, 17)):
        inputs = [torch.randn(B, n, 12, dtype=f64), torch.randn(B, m, 12, dtype=f64)][: 1 if kind == "self" else 2]
        close([compiled(*inputs)], [layer(*inputs)])
    assert graphs.number <= 2


@compiled_function
@pytest.mark.usefixtures("native")
def test_a_compiled_layer_is_not_compiled_again_for_the_next_input():
    torch.compiler.reset()
    layer, graphs = mh.Attention(12, 6), Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for _ in range(3):
        compiled(torch.randn(B, 5, 12))
    assert graphs.number == 1


class Padded(torch.nn.Module):
    """A layer whose padding is an input."""

    def __init__(self, **options):
        super().__init__()
        self.attn = mh.Attention(12, 6, dtype=f64, **options)

    def forward(self, x, keep):
        return self.attn(x, mask=mh.padding(keep))


class Alone(Padded):
    def forward(self, x):
        return self.attn(x)


class Encoder(Padded):
    def forward(self, x, context):
        return self.attn(x, context)


EXPORTED = {
    "causal, no_grad": (Alone, {"mask": mh.causal(), "num_kv_heads": 2}, False),
    "sinks": (Alone, {"mask": mh.causal(), "position": mh.Rotary(), "num_kv_heads": 2, "sinks": True}, True),
    "window": (Alone, {"mask": mh.window(left=3, right=1), "position": mh.ALiBi(6), "gate": True}, True),
    "softcap": (Alone, {"softcap": 2.0, "value_dim": 5}, False),
    "padding": (Padded, {"mask": mh.causal(), "num_kv_heads": 3}, True),
    "context": (Encoder, {"num_kv_heads": 1, "packed": False}, False),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_with_any_batch_and_length(name):
    kind, options, recorded = EXPORTED[name]
    torch.manual_seed(1)
    model = kind(**options).eval()
    rows, tokens, others = (torch.export.Dim(letter, min=2, max=4096) for letter in "BLS")

    def inputs(B, n, m):
        x, seed = torch.randn(B, n, 12, dtype=f64), torch.Generator().manual_seed(n)
        return {
            Alone: (x,),
            Padded: (x, torch.rand(B, n, generator=seed) < 0.6),
            Encoder: (x, torch.randn(B, m, 12, dtype=f64)),
        }[kind]

    x_dims, second = {0: rows, 1: tokens}, {0: rows, 1: tokens if kind is Padded else others}
    with torch.set_grad_enabled(recorded):
        dynamic = (x_dims,) if kind is Alone else (x_dims, second)
        program = torch.export.export(model, inputs(3, 7, 13), dynamic_shapes=dynamic).module()
        for sizes in ((3, 7, 13), (2, 5, 11), (5, 67, 71), (2, 131, 2)):
            given = inputs(*sizes)
            close([program(*given)], [model(*given)], f"{name}, {sizes}")


# Autocast -------------------------------------------------------------------------------------------------------------


def _under_autocast(case: Case) -> Case:
    """The case as autocast makes it: q, k, v rounded, the rest as it was."""
    low = [t.detach().bfloat16().requires_grad_() for t in (case.q, case.k, case.v)]
    return Case(case.number, *low, case.mask, case.options, case.told, case.grads)


def test_autocast_of_the_function():
    tried = dict.fromkeys(("native", "sdpa", "blocks", None), 0)
    for number in range(40_000, 40_020):
        case = draw(number).to(torch.float32)
        low = _under_autocast(case)
        wide = low.to(f64)
        exact, own = by_reference(wide), own_error(low, wide)
        for kernel in tried:
            with torch.autocast("cpu", torch.bfloat16):
                try:
                    found = by_kernel(case, kernel)
                except mh.KernelRefusal:
                    continue
            assert found[0].dtype == torch.bfloat16
            assert found[1].dtype == torch.float32
            assert all(g.dtype == torch.float32 for g in found[2:])  # of the callers' tensors
            rounded = [t.bfloat16() for t in found[2:]]
            same = [torch.equal(a.float(), b) for a, b in zip(rounded, found[2:], strict=True)]
            assert all(ok for ok, name in zip(same, case.grads, strict=True) if name in ("q", "k", "v"))
            assert_within_budget([*found[:2], *rounded], exact, own, f"{kernel}: {case.told}", names(case))
            tried[kernel] += 1
    assert tried[None] == tried["blocks"] == 20
    assert tried["sdpa"] > 3
    assert tried["native"] == (20 if library.available() else 0)


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", "reference", None])
def test_autocast_leaves_float64_alone(kernel):
    call = given(mask=mh.causal())
    with torch.autocast("cpu", torch.bfloat16):
        found = call.by(kernel)
        weights = mh.attention_weights(*call.leaves[:2], mh.causal())
    assert weights.dtype == f64
    close(
        [*found, *torch.autograd.grad(loss(*found), call.leaves)],
        [*call.by_definition(), *torch.autograd.grad(loss(*call.by_definition()), call.leaves)],
    )


@pytest.mark.parametrize("kernel", [NATIVE, "sdpa", "blocks", None])
def test_a_backward_pass_inside_of_autocast_is_one_outside(kernel):
    call = given(dtype=torch.float32, mask=mh.causal(), L=67, S=71)
    answers = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            out, lse = call.by(kernel)
            total = out.float().square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
            answers.append(torch.autograd.grad(total, call.leaves) if inside else total)
    answers[1] = torch.autograd.grad(answers[1], call.leaves)
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("again", [False, True], ids=["", "create_graph"])
def test_autocast_of_the_layer(again):
    torch.manual_seed(1)
    layer = mh.Attention(12, 6, num_kv_heads=2, mask=mh.causal(), position=mh.Rotary(), sinks=True, gate=True)
    x = torch.randn(B, S, 12, requires_grad=True)
    leaves = [x, *layer.parameters()]
    answers = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
            total = out.float().square().sum()
            answers.append(torch.autograd.grad(total, leaves, create_graph=again) if inside else total)
    assert out.dtype == torch.bfloat16
    answers[1] = torch.autograd.grad(answers[1], leaves, create_graph=again)
    plain = layer(x)
    exact = torch.autograd.grad(plain.square().sum(), leaves)
    rounding = torch.finfo(torch.bfloat16).eps
    assert (out - plain).abs().max() < 4 * rounding * plain.abs().max()
    for a, b, want in zip(*answers, exact, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b) or again  # the definition itself is under autocast, or not
        assert (a - want).abs().max() < 8 * rounding * want.abs().max()


# Dropout --------------------------------------------------------------------------------------------------------------

DROPPING = ["blocks", "reference", None]


def _dropped_weights(
    kernel: str | None, rate: float, sizes: tuple[int, int, int, int, int], seed: int = 3, **options: Any
):
    """q, k, and weights as they are after dropout, which are what identity values give."""
    B, H, K, L, S = sizes
    q, k = given(batch=(B,), heads=(H, K), L=L, S=S).leaves[:2]
    one = torch.eye(S, dtype=f64).expand(B, K, S, S)
    torch.manual_seed(seed)
    return q, k, mh.attention(q, k, one, kernel=kernel, dropout=rate, **options)


@pytest.mark.parametrize("kernel", DROPPING)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_and_the_mean_of_dropout(kernel, rate):
    mask = mh.window(left=50)
    q, k, dropped = _dropped_weights(kernel, rate, (3, 4, 2, 131, 139), mask=mask)
    weights = mh.attention_weights(q, k, mask)
    seen = weights > 0
    factor = dropped[seen] / weights[seen]
    kept = factor > 0
    torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / (1 - rate)), rtol=1e-9, atol=0)
    number = seen.sum().item()
    spread = math.sqrt(rate * (1 - rate) / number)
    assert abs(kept.double().mean().item() - (1 - rate)) < 5 * spread
    assert abs(factor.mean().item() - 1) < 5 * spread / (1 - rate)
    # Rows of the batch, heads and blocks of queries are dropped independently of each other.
    keep, both = torch.where(seen, dropped > 0, False).float(), seen.float()
    others = {
        "rows": (keep[0], keep[1], both[0]),
        "heads": (keep[:, 0], keep[:, 1], both[:, 0]),
        "key heads": (keep[:, 0], keep[:, 2], both[:, 0]),
    }
    for a, b, where in others.values():
        alike, pairs = ((a == b) * where).sum().item() / where.sum().item(), where.sum().item()
        chance = rate**2 + (1 - rate) ** 2
        assert abs(alike - chance) < 5 * math.sqrt(chance * (1 - chance) / pairs)


def test_blocks_of_queries_are_dropped_independently():
    _, _, dropped = _dropped_weights("blocks", 0.5, (1, 1, 1, 192, 192))
    tiles = (dropped[0, 0] > 0).split(64)
    for a, b in pairwise(tiles):
        assert abs((a == b).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(a.numel())


@pytest.mark.parametrize("kernel", DROPPING)
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": mh.causal()}, {"mask": mh.window(left=7) & mh.lengths([67, 0]), "softcap": 2.0}],
    ids=["plain", "causal", "window"],
)
def test_dropout_is_that_of_the_reference(kernel, options):
    """With the mask it drew, the definition gives the same output and gradients."""
    sizes = (2, 6, 3, 67, 71)
    q, k, dropped = _dropped_weights(kernel, 0.3, sizes, **options)
    weights = mh.attention_weights(q, k, **options)
    factors = torch.where(weights > 0, dropped / weights, 0.0).detach()
    v = torch.randn(2, 3, 71, D, dtype=f64, requires_grad=True)
    torch.manual_seed(3)
    exact = reference.attention(q, k, v, dropout_mask=factors, **options)
    wanted = exact.out, exact.lse
    if kernel is None:  # what is taken depends on whether lse is asked for, and so does what is drawn
        found, wanted = (mh.attention(q, k, v, dropout=0.3, **options),), wanted[:1]
    else:
        found = mh.attention(q, k, v, kernel=kernel, dropout=0.3, return_lse=True, **options)
    torch.testing.assert_close(found[0], exact.out, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(loss(*t), (q, k, v)) for t in (found, wanted)]
    for have, want in zip(*grads, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kernel", DROPPING)
@pytest.mark.parametrize("dtype", [f64, torch.float32, torch.bfloat16])
def test_dropout_repeats_with_its_seed(kernel, dtype):
    call = given(dtype=dtype, mask=mh.causal(), L=67, S=71)
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        out, _ = call.by(kernel, dropout=0.3)
        torch.manual_seed(77)  # what happens in between does not matter to the backward pass
        runs.append([out, *torch.autograd.grad(out.float().sum(), call.leaves[2])])
        second, _ = call.by(kernel, dropout=0.3)
        assert not torch.equal(out, second)
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


@pytest.mark.parametrize("kernel", DROPPING)
def test_dropout_of_all_and_of_nothing(kernel):
    call = given("sinks", mask=mh.causal())
    out, _ = mh.attention(**call.tensors, **call.fixed, dropout=1.0, kernel=kernel, return_lse=True)
    assert not out.any()
    assert all(not g.any() for g in torch.autograd.grad(out.square().sum(), call.leaves))
    without, with_none = (call.by(kernel, **more) for more in ({}, {"dropout": 0}))
    assert all(torch.equal(a, b) for a, b in zip(without, with_none, strict=True))


@pytest.mark.parametrize("kernel", DROPPING)
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_checkpointing(kernel, reentrant):
    call = given(mask=mh.causal(), L=67, S=71)

    def function(*tensors):
        return call.by(kernel, *tensors, dropout=0.4)[0]

    answers = []
    for run in (function, lambda *tensors: checkpoint(function, *tensors, use_reentrant=reentrant)):
        torch.manual_seed(8)
        for leaf in call.leaves:
            leaf.grad = None
        out = run(*call.leaves)
        out.square().sum().backward()  # the reentrant way knows no torch.autograd.grad
        answers.append([out, *(leaf.grad for leaf in call.leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


# Threads, hooks, what is saved ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [NATIVE, "sdpa", "blocks"])
@pytest.mark.parametrize("options", [{}, {"mask": mh.window(left=30, right=0)}], ids=["plain", "window"])
def test_the_number_of_threads_does_not_matter(kernel, options):
    call = given(dtype=torch.float32, L=131, S=139, **options)
    answers = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = call.by(kernel)
        answers.append([*found, *torch.autograd.grad(loss(*found), call.leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_calls_from_several_threads():
    """Each thread has its own dropout, masks and gradients; none of them may get into another's."""
    masks = [mh.causal(), mh.window(left=5), mh.lengths([7, 60]), mh.documents(torch.arange(71) // 9)]
    calls = [given(seed=n, L=67, S=71, mask=mask) for n, mask in enumerate(masks)]
    softcaps = [None, 2.0]
    jobs = [
        (call, kernel, cap) for call in calls for kernel, cap in (("sdpa", None), *((("blocks"), c) for c in softcaps))
    ]
    together = threading.Barrier(4)

    def run(job):
        call, kernel, cap = job
        found = call.by(kernel, softcap=cap)
        return [*found, *torch.autograd.grad(loss(*found), call.leaves)]

    def run_at_once(job):
        together.wait(timeout=30)
        return run(job)

    alone = [run(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(run_at_once, jobs))
    for found, exact, (_, kernel, cap) in zip(at_once, alone, jobs, strict=True):
        close(found, exact, f"{kernel}, softcap={cap}")


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", None])
def test_hooks_on_saved_tensors(kernel):
    call = given("sinks", mask=mh.causal(), L=67, S=71)  # with lse, so not for the kernel that keeps the weights
    largest = 0

    def pack(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor.clone()

    answers = []
    for hooks in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        with hooks:
            found = mh.attention(**call.tensors, **call.fixed, kernel=kernel, return_lse=True)
        answers.append([*found, *torch.autograd.grad(loss(*found), call.leaves)])
    for have in answers:
        close(have, [*call.by_definition(), *torch.autograd.grad(loss(*call.by_definition()), call.leaves)])
    assert 0 < largest < B * H * 67 * 71


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", None])
@pytest.mark.parametrize("changed", ["q", "k", "v"])
@pytest.mark.parametrize("mask", [None, mh.causal()], ids=repr)
def test_what_is_changed_before_its_backward_pass_is_noticed(kernel, changed, mask):
    call = given(S=L, mask=mask)
    tensors = {name: x.detach().clone().requires_grad_() * 1 for name, x in call.tensors.items()}
    out, _ = call.by(kernel, *tensors.values())
    tensors[changed].detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_bias_that_is_changed_before_its_backward_pass_is_noticed():
    call = given("bias")
    out, _ = call.by("blocks")
    with torch.no_grad():
        call.tensors["bias"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kernel", ["sdpa", "blocks"])
def test_a_graph_can_be_kept_and_is_freed_otherwise(kernel):
    call = given(mask=mh.causal())
    out, _ = call.by(kernel)
    first = torch.autograd.grad(out.sum(), call.leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), call.leaves), strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), call.leaves)


# Memory ---------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest number of elements among the storages that operations make."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for y in out if isinstance(out, tuple | list) else [out]:
            if isinstance(y, Tensor):
                self.elements = max(self.elements, y.untyped_storage().nbytes() // y.element_size())
        return out


LONG = 1024
FRUGAL = {
    "window": ("blocks", (), {"mask": mh.window(left=31, right=0)}),
    "window, chosen": (None, (), {"mask": mh.window(left=31, right=0)}),
    "causal": (None, (), {"mask": mh.causal()}),
    "plain": (None, (), {}),
    "plain, lse": (None, (), {"return_lse": True}),
    "dropout": (None, (), {"mask": mh.causal(), "dropout": 0.1}),
    "softcap, sinks": (None, ("sinks",), {"mask": mh.causal(), "softcap": 3.0}),
    "documents": (None, (), {"mask": mh.causal() & mh.documents(torch.arange(LONG) // 100)}),
    "alibi in a window": (None, (), {"mask": mh.window(left=31, right=0), "bias": mh.ALiBi(2)}),
    "positions": (None, (), {"mask": mh.window(left=31, right=0), "q_positions": torch.arange(LONG), "V": 19}),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", FRUGAL)
def test_no_tensor_of_l_times_s(name):
    kernel, more, options = FRUGAL[name]
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, LONG, width, requires_grad=True) for width in (16, 16, options.get("V", 16)))
    options = {n: value for n, value in options.items() if n != "V"}
    if "sinks" in more:
        options["sinks"] = torch.zeros(2, requires_grad=True)
    with Largest() as largest:
        out = mh.attention(q, k, v, kernel=kernel, **options)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out.square().sum(), (q, k, v))
    assert 2 * 16 * LONG <= largest.elements < LONG * LONG


# What has a gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", "reference", None])
@pytest.mark.parametrize(
    "wanted", [("q",), ("k",), ("v",), ("bias",), ("sinks",), ("q", "sinks"), ("v", "bias")], ids="+".join
)
def test_gradients_of_some(kernel, wanted):
    call = given("bias", "sinks", mask=mh.causal(), L=67, S=71)
    for name, leaf in call.tensors.items():
        leaf.requires_grad_(name in wanted)
    leaves = [call.tensors[name] for name in wanted]
    if kernel == "sdpa" and "bias" in wanted:
        with pytest.raises(mh.KernelRefusal, match="bias"):
            call.by(kernel)
        return
    found, exact = call.by(kernel), call.by_definition()
    close(
        [*found, *torch.autograd.grad(loss(*found), leaves)],
        [*exact, *torch.autograd.grad(loss(*exact), leaves)],
    )


@pytest.mark.parametrize("kernel", ["sdpa", "blocks", "reference", None])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kernel, mode):
    """The same numbers, and nothing recorded. A bias that is learned is no obstacle where nothing is."""
    call = given("bias", "sinks", mask=mh.causal(), L=67, S=71)
    with mode():
        found = call.by(kernel)
    assert not any(t.requires_grad for t in found)
    assert all(t.is_inference() == (mode is torch.inference_mode) for t in found)
    close([t.clone() for t in found], [t.detach() for t in call.by_definition()])


@pytest.mark.parametrize("kernel", ["sdpa", "blocks"])
def test_only_one_of_out_and_lse_is_used(kernel):
    call = given(mask=mh.causal())
    for i in (0, 1):
        found, exact = call.by(kernel)[i], call.by_definition()[i]
        options = {"allow_unused": True, "materialize_grads": True}
        close(
            torch.autograd.grad(found.sin().sum(), call.leaves, **options),
            torch.autograd.grad(exact.sin().sum(), call.leaves, **options),
        )
