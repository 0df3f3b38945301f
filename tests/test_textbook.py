"""The textbook against `Attention` and torch's layer; and its classic mistakes, made on purpose in its own source."""

import contextlib
import inspect
import io
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from multihead import Attention, causal, textbook
from multihead.textbook import (
    CausalSelfAttention,
    CrossAttention,
    MultiHeadSelfAttention,
    PackedAttention,
    SelfAttention,
)

CLASSES = (SelfAttention, MultiHeadSelfAttention, CrossAttention, PackedAttention, CausalSelfAttention)
N, H, L, S, D, KDIM, VDIM = 2, 3, 5, 7, 11, 13, 17
E = 33  # H D
f64 = torch.float64
DOCS = Path(__file__).parent.parent / "docs" / "textbook.md"


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def close(a, b, name="", atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m: f"{name}: {m}")


def make(cls, *args, **options):
    """A layer none of whose parameters is 0."""
    layer = cls(*args, **options).to(f64)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(draw(*p.shape, seed=i) * 0.2)
    return layer


def outcome(out, weights, inputs, layer):
    """Output, weights, and the gradients of both by name."""
    loss = (out * draw(*out.shape, seed=90)).sum()
    if weights is not None:
        loss = loss + (weights * draw(*weights.shape, seed=91)).sum()
    named = {f"input {i}": x for i, x in enumerate(inputs)} | dict(layer.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    found = {"out": out} | dict(zip(named, grads, strict=True))
    return found if weights is None else found | {"weights": weights}


def agree(got, want):
    assert got.keys() == want.keys()
    for name in want:
        # A bias of all keys moves all scores of a row alike, which the softmax does not notice.
        assert want[name].abs().max() > 1e-3 or name == "k_proj.bias", f"{name}: nothing is tested"
        close(got[name], want[name], name)


def real_one(layer, **options):
    """`Attention` with the weights of a textbook layer."""
    state = {k.replace("in_proj", "qkv_proj"): v for k, v in layer.state_dict().items() if k != "visible"}
    if isinstance(layer, SelfAttention):
        real = Attention(layer.embed_dim, 1, packed=False, dtype=f64)
        real.out_proj = nn.Identity()
    else:
        width = layer.out_proj.in_features
        real = Attention(width, H, packed="qkv_proj.weight" in state, dtype=f64, **options)
    real.load_state_dict(state)
    return real


def compare(layer, sources, mask=None, **options):
    """A sequence-first layer with `Attention`, given the same objects."""
    inputs = list({id(x): x.requires_grad_() for x in sources}.values())
    args = sources[:1] if isinstance(layer, SelfAttention | MultiHeadSelfAttention) else sources
    got = outcome(*(layer(*args) if mask is None else layer(*args, mask)), inputs, layer)

    real = real_one(layer, **options)
    turned = {id(x): x.movedim(0, -2) for x in inputs}
    out, weights = real(*(turned[id(x)] for x in args), mask=None if mask is None else ~mask, weights=True)
    if isinstance(layer, SelfAttention):
        weights = weights.squeeze(-3)
    want = outcome(out.movedim(-2, 0), weights, inputs, real)
    agree(got, {name.replace("qkv_proj", "in_proj"): value for name, value in want.items()})
    return got


def masks(length, source):
    """True = blocked. In each one some rows see nothing: a query, or all queries of a batch item."""
    table = draw(length, source, seed=70) > 0.4
    table[1] = True
    padding = torch.zeros(N, source, dtype=torch.bool)
    padding[0, 2:] = True
    padding[1] = True
    each = draw(N, H, length, source, seed=71) > 0.4
    each[:, 1, 2] = True
    return {"none": None, "table": table, "padding": padding[:, None, None], "of each head": each}


MASKS = list(masks(L, S))
CALLS = ("self", "encoder-decoder", "three", "key is query")


def sources_of(call):
    x, a, b, c = draw(L, N, E, seed=40), draw(S, N, E, seed=41), draw(S, N, E, seed=42), draw(L, N, E, seed=43)
    given = {"self": (x, x, x), "encoder-decoder": (x, a, a), "three": (x, a, b), "key is query": (x, x, c)}
    return given[call]


# The same numbers as the real thing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(L, N, E), (L, E), (L, 1, E)], ids=str)
def test_one_head(shape):
    x = draw(*shape, seed=40)
    got = compare(make(SelfAttention, E), (x, x, x))
    assert got["out"].shape == shape
    assert got["weights"].shape == (*shape[1:-1], shape[0], shape[0])


@pytest.mark.parametrize("mask", MASKS)
def test_heads(mask):
    x = draw(L, N, E, seed=40)
    got = compare(make(MultiHeadSelfAttention, E, H), (x, x, x), masks(L, L)[mask])
    assert got["out"].shape == (L, N, E)
    assert got["weights"].shape == (N, H, L, L)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("kdim", "vdim"), [(KDIM, VDIM), (None, None), (KDIM, KDIM)])
def test_cross(kdim, vdim, mask):
    layer = make(CrossAttention, E, H, kdim=kdim, vdim=vdim)
    given = draw(L, N, E, seed=40), draw(S, N, kdim or E, seed=41), draw(S, N, vdim or E, seed=42)
    got = compare(layer, given, masks(L, S)[mask], kdim=kdim, vdim=vdim)
    assert got["out"].shape == (L, N, E)
    assert got["weights"].shape == (N, H, L, S)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("call", CALLS)
def test_packed(call, mask):
    given = sources_of(call)
    compare(make(PackedAttention, E, H), given, masks(L, given[1].shape[0])[mask])


@pytest.mark.parametrize(("call", "products"), [("self", 1), ("encoder-decoder", 2), ("three", 3), ("key is query", 3)])
def test_packed_makes_as_few_products_as_torch(call, products, monkeypatch):
    layer, given, linear, made = make(PackedAttention, E, H), sources_of(call), F.linear, []
    monkeypatch.setattr(F, "linear", lambda *args: made.append(args[0]) or linear(*args))
    layer(*given)
    assert len(made) == products + 1, "and the output projection"
    made.clear()
    F._in_projection_packed(*given, layer.in_proj.weight, layer.in_proj.bias)
    assert len(made) == products


def test_packed_tells_by_object_and_gives_the_same_for_copies():
    layer, x = make(PackedAttention, E, H), draw(L, N, E)
    for given in ((x, x.clone(), x.clone()), (x, x, x.clone())):
        for a, b in zip(layer(*given), layer(x, x, x), strict=True):
            close(a, b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("T", [1, L, S])
def test_causal(T, bias):
    layer, x = make(CausalSelfAttention, E, H, S, bias=bias).eval(), draw(N, T, E, seed=40).requires_grad_()
    real = real_one(layer, mask=causal(), bias=bias).eval()
    want = real(x)
    assert layer(x).shape == (N, T, E)
    if T > 1:
        agree(outcome(layer(x), None, [x], layer), outcome(want, None, [x], real))
    close(layer(x), want)
    later = x.detach().clone()
    later[:, T // 2 + 1 :] += 1.0
    close(layer(later)[:, : T // 2 + 1], want[:, : T // 2 + 1], "what comes later")


# The same numbers as torch's layer ------------------------------------------------------------------------------------


def agree_with_torch(layer, theirs, given, mask):
    """Output, weights, and the gradients to the inputs."""
    inputs = list({id(x): x.requires_grad_() for x in given}.values())
    per_head = None if mask is None else mask.expand(N, H, L, given[1].shape[0]).flatten(0, 1)
    pairs = [layer(*given, mask), theirs(*given, attn_mask=per_head, average_attn_weights=False)]
    got, want = (
        (*pair, *torch.autograd.grad(sum((t * draw(*t.shape, seed=90)).sum() for t in pair), inputs)) for pair in pairs
    )
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert b.abs().max() > 1e-3
        close(a, b, str(i))


def seeing(length, source):
    """A mask that leaves each row something: torch gives NaN elsewhere."""
    mask = draw(length, source, seed=70) > 0.4
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_packed_is_torchs(call, masked):
    layer, theirs, given = make(PackedAttention, E, H), nn.MultiheadAttention(E, H, dtype=f64), sources_of(call)
    theirs.load_state_dict({k.replace("in_proj.", "in_proj_"): v for k, v in layer.state_dict().items()})
    agree_with_torch(layer, theirs, given, seeing(L, given[1].shape[0]) if masked else None)


@pytest.mark.parametrize("masked", [False, True])
def test_cross_is_torchs(masked):
    layer, theirs = (
        make(CrossAttention, E, H, kdim=KDIM, vdim=VDIM),
        nn.MultiheadAttention(E, H, kdim=KDIM, vdim=VDIM, dtype=f64),
    )
    state = layer.state_dict()
    biases = torch.cat([state.pop(f"{part}_proj.bias") for part in "qkv"])
    weights = {f"{part}_proj_weight": state.pop(f"{part}_proj.weight") for part in "qkv"}
    theirs.load_state_dict({**state, **weights, "in_proj_bias": biases})
    given = draw(L, N, E, seed=40), draw(S, N, KDIM, seed=41), draw(S, N, VDIM, seed=42)
    agree_with_torch(layer, theirs, given, seeing(L, S) if masked else None)


# Rows that see nothing ------------------------------------------------------------------------------------------------


def masked_ones():
    """Each layer that takes a mask, as a function of (x, mask)."""
    heads, cross, packed = (make(cls, E, H) for cls in (MultiHeadSelfAttention, CrossAttention, PackedAttention))
    return [
        (heads, heads),
        (cross, lambda x, mask: cross(x, x, x, mask)),
        (packed, lambda x, mask: packed(x, x, x, mask)),
    ]


@pytest.mark.parametrize("i", range(3), ids=["heads", "cross", "packed"])
def test_a_row_that_sees_nothing_is_zero(i):
    layer, call = masked_ones()[i]
    mask = torch.zeros(L, L, dtype=torch.bool)
    mask[2] = True
    x = draw(L, N, E).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):  # raises where a NaN comes up on the way back, even if it goes again
        out, weights = call(x, mask)
        grads = torch.autograd.grad(out.square().sum() + weights.square().sum(), [x, *layer.parameters()])
    assert not weights[:, :, 2].any()
    close(weights.sum(-1)[:, :, [0, 1, 3, 4]], torch.ones(N, H, 4, dtype=f64))
    close(out[2], layer.out_proj.bias.expand(N, E))
    assert all(g.isfinite().all() for g in grads)
    assert torch.autograd.grad(call(x, torch.ones_like(mask))[0].sum(), x)[0].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_that_sees_nothing_in_other_dtypes(dtype):
    layer, mask = make(MultiHeadSelfAttention, E, H).to(dtype), masks(L, L)["table"]
    out, weights = layer(draw(L, N, E).to(dtype), mask)
    assert out.dtype == weights.dtype == dtype
    assert out.isfinite().all()
    assert not weights[:, :, mask].any()
    assert weights[:, :, ~mask].all()


# Dropout --------------------------------------------------------------------------------------------------------------


def dropping(rate):
    """Each layer that has dropout, called with one x."""
    x = draw(L, N, E, seed=40)
    pairs = [(make(cls, E, H, dropout=rate), (x,) * n) for cls, n in zip(CLASSES[1:4], (1, 3, 3), strict=True)]
    return [*pairs, (make(CausalSelfAttention, E, H, S, drop_rate=rate), (x.transpose(0, 1),))]


@pytest.mark.parametrize("i", range(4), ids=[cls.__name__ for cls in CLASSES[1:]])
def test_dropout_acts_only_in_training_and_repeats(i):
    layer, given = dropping(0.5)[i]
    gives_weights = not isinstance(layer, CausalSelfAttention)

    def run(seed):
        torch.manual_seed(seed)
        return layer(*given) if gives_weights else (layer(*given), torch.ones(1))

    (out, weights), (again, _), (other, _) = run(0), run(0), run(1)
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    layer.eval()
    (plain, same_weights), (still, _) = run(0), run(1)
    assert torch.equal(plain, still)
    assert not torch.equal(plain, out)
    assert torch.equal(weights, same_weights), "weights are given before dropout"
    never, given = dropping(0.0)[i]
    assert torch.equal(never(*given)[0], layer(*given)[0])


@pytest.mark.parametrize("i", range(4), ids=[cls.__name__ for cls in CLASSES[1:]])
def test_what_is_dropped(i):
    layer, given = dropping(1.0)[i]
    if isinstance(layer, CausalSelfAttention):
        assert not layer(*given).any(), "the output is dropped too"
        layer.out_dropout.p = 0.0
        out = layer(*given)
    else:
        out, weights = layer(*given)
        assert weights.any()
    close(out, layer.out_proj.bias.expand_as(out), "without weights nothing but the bias is left")


# The causal mask is a buffer ------------------------------------------------------------------------------------------


def test_the_buffer_moves_and_is_saved():
    layer = CausalSelfAttention(E, H, S)
    assert dict(layer.named_buffers()).keys() == {"visible"}
    assert "visible" not in dict(layer.named_parameters())
    assert torch.equal(layer.state_dict()["visible"], torch.ones(S, S).tril().bool())
    layer.to(f64)
    assert layer(draw(N, S, E)).dtype == f64
    assert layer.visible.dtype == torch.bool, "a mask stays a mask in any dtype"
    layer.to("meta")
    assert layer.visible.device.type == "meta"
    assert layer(torch.empty(N, S, E, dtype=f64, device="meta")).shape == (N, S, E)


def test_the_buffer_is_loaded():
    layer, other = make(CausalSelfAttention, E, H, S).eval(), CausalSelfAttention(E, H, S).to(f64).eval()
    layer.visible[3, 3] = False
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.visible, layer.visible)
    assert torch.equal(other(draw(N, L, E)), layer(draw(N, L, E)))


# The classic mistakes, made in the classes' own source ----------------------------------------------------------------


def mistaken(cls, *edits):
    """The class with pieces of its source replaced."""
    source = inspect.getsource(cls)
    for right, wrong in edits:
        assert source.count(right) == 1, f"{right} is there {source.count(right)} times"
        source = source.replace(right, wrong)
    names = dict(vars(textbook))
    exec(source, names)
    return names[cls.__name__]


def told(cls, *messages):
    """The docstring has them, and the page twice: in English and in Chinese."""
    flat = " ".join(inspect.getdoc(cls).split())
    for message in messages:
        assert message in flat
        assert DOCS.read_text(encoding="utf-8").count(message) == 2, message


def fails(error, message):
    return pytest.raises(error, match=re.escape(message))


def test_softmax_over_the_queries():
    told(SelfAttention, "softmax(dim=-2)")
    wrong = make(mistaken(SelfAttention, ("softmax(dim=-1)", "softmax(dim=-2)")), E)
    _, weights = wrong(draw(L, N, E))
    close(weights.sum(-2), torch.ones(N, L, dtype=f64))
    assert (weights.sum(-1) - 1).abs().min() > 1e-3


def test_scaled_by_the_whole_width():
    wrong, right, x = mistaken(MultiHeadSelfAttention, ("math.sqrt(D)", "math.sqrt(E)")), MultiHeadSelfAttention, draw
    (_, flat), (_, weights) = (make(cls, E, H)(x(L, N, E)) for cls in (wrong, right))
    close(flat, (weights.log() / H**0.5).softmax(-1), "scores are sqrt(H) times too small")
    assert (flat.max(-1).values < weights.max(-1).values).all()
    assert ((flat * flat.log()).sum(-1) < (weights * weights.log()).sum(-1)).all(), "too even"


def test_minus_1e9_in_half_precision():
    message = "value cannot be converted to type c10::Half without overflow"
    told(MultiHeadSelfAttention, message, "torch.tensor(-1e9).half()", "-65504")
    layer = make(mistaken(MultiHeadSelfAttention, ("torch.finfo(scores.dtype).min", "-1e9")), E, H)
    x, mask = draw(L, N, E), masks(L, L)["table"]
    assert layer(x, mask)[0].isfinite().all(), "in float64 nothing is amiss"
    with fails(RuntimeError, message):
        layer.half()(x.half(), mask)
    with fails(RuntimeError, message), torch.autocast("cpu", dtype=torch.float16):
        layer.float()(x.float(), mask)
    assert torch.finfo(torch.float16).min == -65504
    assert torch.tensor(-1e9).half() == -torch.inf
    assert torch.tensor([-1e9, -1e9]).half().softmax(-1).isnan().all()


def test_minus_infinity_where_all_is_blocked():
    """Why scores are filled with the lowest number, and weights with 0."""
    x, mask = draw(L, N, E).requires_grad_(), masks(L, L)["table"]
    infinite, once = ("torch.finfo(scores.dtype).min", "-math.inf"), (".masked_fill(blocked, 0.0)", "")
    _, weights = make(mistaken(MultiHeadSelfAttention, infinite, once), E, H)(x, mask)
    assert weights[:, :, 1].isnan().all()
    _, weights = make(mistaken(MultiHeadSelfAttention, once), E, H)(x, mask)
    close(weights[:, :, 1], torch.full((N, H, L), 1 / L, dtype=f64), "even")
    out, _ = make(mistaken(MultiHeadSelfAttention, infinite), E, H)(x, mask)
    with fails(RuntimeError, "returned nan values"), torch.autograd.set_detect_anomaly(True):
        make(mistaken(MultiHeadSelfAttention, infinite), E, H)(x, mask)[0].sum().backward()
    assert out.isfinite().all()


def test_view_after_permute():
    message = "view size is not compatible with input tensor's size and stride"
    told(MultiHeadSelfAttention, message)
    with fails(RuntimeError, message):
        make(mistaken(MultiHeadSelfAttention, ("reshape(L, N, E)", "view(L, N, E)")), E, H)(draw(L, N, E))
    layer = make(mistaken(MultiHeadSelfAttention, ("reshape(L, N, E)", "contiguous().view(L, N, E)")), E, H)
    assert torch.equal(layer(draw(L, N, E))[0], make(MultiHeadSelfAttention, E, H)(draw(L, N, E))[0])
    with fails(RuntimeError, message):
        draw(N, H, L, D).transpose(1, 2).view(N, L, E)


def test_linear_the_wrong_way_round():
    message = "mat1 and mat2 shapes cannot be multiplied"
    told(CrossAttention, message, "nn.Linear(embed_dim, kdim)")
    wrong = mistaken(CrossAttention, ("nn.Linear(kdim, embed_dim)", "nn.Linear(embed_dim, kdim)"))
    with fails(RuntimeError, message):
        make(wrong, E, H, kdim=KDIM)(draw(L, N, E), draw(S, N, KDIM), draw(S, N, E))
    assert make(wrong, E, H)(draw(L, N, E), draw(S, N, E), draw(S, N, E))[0].shape == (L, N, E)


def test_keys_with_the_queries_length():
    message = "is invalid for input of size"
    told(CrossAttention, message, "k.view(L, N, H, D)")
    wrong = mistaken(CrossAttention, ("self.k_proj(key).unflatten(-1, (H, D))", "self.k_proj(key).view(L, N, H, D)"))
    with fails(RuntimeError, message):
        make(wrong, E, H)(draw(L, N, E), draw(S, N, E), draw(S, N, E))
    given = draw(L, N, E), draw(L, N, E, seed=1), draw(L, N, E, seed=2)
    assert torch.equal(make(wrong, E, H)(*given)[0], make(CrossAttention, E, H)(*given)[0]), "unnoticed while L = S"


def test_packed_without_key_and_value():
    told(PackedAttention, "in_proj(query).chunk(3)")
    wrong = make(mistaken(PackedAttention, ("if query is key and key is value:", "if True:")), E, H)
    x, a, b = (draw(L, N, E, seed=i) for i in range(3))
    right = make(PackedAttention, E, H)
    assert torch.equal(wrong(x, x, x)[0], right(x, x, x)[0])
    assert torch.equal(wrong(x, a, b)[0], wrong(x, x, x)[0])
    assert (wrong(x, a, b)[0] - right(x, a, b)[0]).abs().max() > 0.1


def test_dropout_compared_with_a_number():
    message = "'>' not supported between instances of 'Dropout' and 'int'"
    told(CausalSelfAttention, message, "if self.dropout > 0")
    step = "self.dropout(scores.softmax(dim=-1))"
    layer = make(mistaken(CausalSelfAttention, (step, f"{step} if self.dropout > 0 else scores.softmax(-1)")), E, H, S)
    with fails(TypeError, message):
        layer.eval()(draw(N, L, E))


def test_longer_than_the_block():
    message = "The size of tensor a (4) must match the size of tensor b (5)"
    told(CausalSelfAttention, message)
    wrong = mistaken(CausalSelfAttention, ("x.shape[1] > self.block_size", "False"))
    with fails(RuntimeError, message):
        make(wrong, E, H, 4)(draw(N, 5, E))


def test_every_mistake_is_here():
    """A line with a dash for each in the docstrings, a row of each table on the page."""
    named = sum(line.lstrip().startswith("- ") for cls in CLASSES for line in cls.__doc__.splitlines())
    assert named == 9
    page = DOCS.read_text(encoding="utf-8")
    for heading in ("| mistake |", "| 错误 |"):
        rows = page[page.index(heading) :].split("\n\n")[0].splitlines()
        assert len(rows) == 2 + named


# Bad input ------------------------------------------------------------------------------------------------------------

X = torch.zeros(L, N, E)
MASK = torch.zeros(L, L, dtype=torch.bool)
HEADS, CROSS, PACKED = MultiHeadSelfAttention(E, H), CrossAttention(E, H, KDIM, VDIM), PackedAttention(E, H)
CAUSAL = CausalSelfAttention(E, H, L)
KEY, VALUE = torch.zeros(S, N, KDIM), torch.zeros(S, N, VDIM)

BAD = [
    (lambda: SelfAttention(0), ValueError, r"^embed_dim: expected at least 1, got 0\."),
    (lambda: SelfAttention(8.0), TypeError, r"^embed_dim: expected an int, got 8\.0\."),
    (lambda: SelfAttention(True), TypeError, r"^embed_dim: expected an int, got True"),
    (lambda: SelfAttention(E)(X[..., :-1]), ValueError, r"^x: .*\(L, N, E\) or \(L, E\).* 33 .*\(5, 2, 32\)"),
    (lambda: SelfAttention(E)(X[0, 0]), ValueError, r"^x: expected the shape .*\(33,\)"),
    (lambda: SelfAttention(E)([1.0]), TypeError, r"^x: expected a tensor .*got list"),
    (lambda: MultiHeadSelfAttention(8, 3), ValueError, r"^embed_dim: expected a multiple of num_heads=3, got 8\. Each"),
    (lambda: MultiHeadSelfAttention(8, 0), ValueError, r"^num_heads: expected at least 1, got 0"),
    (lambda: MultiHeadSelfAttention(-8, 2), ValueError, r"^embed_dim: expected at least 1, got -8"),
    (lambda: MultiHeadSelfAttention(8, "2"), TypeError, r"^num_heads: expected an int, got '2'"),
    (lambda: MultiHeadSelfAttention(8, 2, 1.5), ValueError, r"^dropout: expected a number from 0 to 1, got 1\.5"),
    (lambda: MultiHeadSelfAttention(8, 2, nn.Dropout(0.1)), TypeError, r"^dropout: .*Dropout.*such as 0\.1"),
    (lambda: HEADS(X[0]), ValueError, r"^x: expected the shape \(L, N, E\) with 33 .*\(2, 33\)"),
    (lambda: HEADS(X, MASK.float()), TypeError, r"^mask: expected a bool tensor, True = blocked, got torch\.float32"),
    (lambda: HEADS(X, True), TypeError, r"^mask: expected a bool tensor, True = blocked, got bool"),
    (lambda: HEADS(X, MASK[1:]), ValueError, r"^mask: .*\(2, 3, 5, 5\), got \(4, 5\)"),
    (lambda: HEADS(X, MASK.expand(N * H, L, L)), ValueError, r"^mask: .*got \(6, 5, 5\).*unflatten\(0, \(N, H\)\)"),
    (lambda: HEADS(X, MASK.expand(H, L, L)), ValueError, r"^mask: expected \(L, S\) or .*got \(3, 5, 5\)"),
    (lambda: HEADS(X, MASK.expand(1, 1, L, L).expand(4, 1, L, L)), ValueError, r"^mask: .*got \(4, 1, 5, 5\)"),
    (lambda: CrossAttention(8, 3), ValueError, r"^embed_dim: expected a multiple of num_heads=3, got 8"),
    (lambda: CrossAttention(8, 2, kdim=0), ValueError, r"^kdim: expected at least 1, got 0"),
    (lambda: CrossAttention(8, 2, vdim=2.5), TypeError, r"^vdim: expected an int, got 2\.5"),
    (lambda: CrossAttention(8, 2, dropout=-0.1), ValueError, r"^dropout: expected a number from 0 to 1, got -0\.1"),
    (lambda: CROSS(X[..., 1:], KEY, VALUE), ValueError, r"^query: .*\(L, N, E\) with 33 .*\(5, 2, 32\)"),
    (lambda: CROSS(X, VALUE, VALUE), ValueError, r"^key: .*\(S, N, kdim\) with 13 .*\(7, 2, 17\)"),
    (lambda: CROSS(X, KEY, KEY), ValueError, r"^value: .*\(S, N, vdim\) with 17 .*\(7, 2, 13\)"),
    (lambda: CROSS(X, KEY, None), TypeError, r"^value: expected a tensor .*NoneType"),
    (lambda: CROSS(X, KEY, VALUE[1:]), ValueError, r"^value: expected S and N of key, \(7, 2\), got \(6, 2\)"),
    (lambda: CROSS(X, KEY[:, :1], VALUE[:, :1]), ValueError, r"^key: expected N=2 as in query, got 1.*sequence"),
    (lambda: PackedAttention(8, 3), ValueError, r"^embed_dim: expected a multiple of num_heads=3, got 8"),
    (lambda: PackedAttention(8, 2, 2), ValueError, r"^dropout: expected a number from 0 to 1, got 2"),
    (lambda: PACKED(X, KEY, KEY), ValueError, r"^key: .* 33 .*\(7, 2, 13\)"),
    (lambda: PACKED(X, X, X, MASK[:, 1:]), ValueError, r"^mask: .*got \(5, 4\)"),
    (lambda: CausalSelfAttention(8, 3, 4), ValueError, r"^n_embd: expected a multiple of n_heads=3, got 8"),
    (lambda: CausalSelfAttention(8, 2, 0), ValueError, r"^block_size: expected at least 1, got 0"),
    (lambda: CausalSelfAttention(8, 2, None), TypeError, r"^block_size: expected an int, got None"),
    (lambda: CausalSelfAttention(8, 2, 4, drop_rate=2), ValueError, r"^drop_rate: expected a number .*, got 2"),
    (lambda: CAUSAL(torch.zeros(N, S, E)), ValueError, r"^x: expected T up to block_size=5, got 7\."),
    (lambda: CAUSAL(torch.zeros(N, L, E + 1)), ValueError, r"^x: .*\(B, T, C\) with 33 .*\(2, 5, 34\)"),
]  # fmt: skip


class Noted(TorchDispatchMode):
    """What torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("i", range(len(BAD)))
def test_bad_input(i):
    call, error, message = BAD[i]
    with pytest.raises(error, match=message):
        call()


LONG = torch.zeros(N, S, E)


@pytest.mark.parametrize(
    "call",
    [
        lambda: MultiHeadSelfAttention(8, 2, 1.5),
        lambda: CrossAttention(8, 2, vdim=0),
        lambda: CrossAttention(8, 2, dropout=2),
        lambda: PackedAttention(8, 2, 2),
        lambda: CausalSelfAttention(8, 2, 4, drop_rate=2),
        lambda: CausalSelfAttention(8, 2, 0),
        lambda: HEADS(X, MASK[..., None]),
        lambda: CROSS(X, KEY, VALUE, MASK),
        lambda: PACKED(X, X, X, MASK[..., None]),
        lambda: CAUSAL(LONG),
    ],
)
def test_checks_come_first(call):
    with Noted() as noted, pytest.raises(ValueError, match=r"^\w+: expected"):
        call()
    assert not set(noted.seen) - {"aten.unsqueeze.default"}, "which is the test's own"


# The file and the page ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_classes_are_short(cls):
    assert len(inspect.getsource(cls).splitlines()) < 40


@pytest.mark.parametrize("cls", CLASSES)
def test_every_step_tells_its_shape(cls):
    body = inspect.getsource(cls.forward).splitlines()[1:]
    steps = [line for line in body if re.match(r"\s+\S.* = .*(@|\(.*\))", line) and ".shape" not in line]
    without = [line for line in steps if not re.search(r"# .*\(.*[ETLS]", line) and "_mask_or_nothing" not in line]
    assert len(steps) >= 4
    assert not without


def test_the_file_stands_alone():
    """Copied out, it runs where there is no multihead."""
    source = Path(textbook.__file__).read_text(encoding="utf-8")
    assert "multihead" not in re.sub(r'"""[\s\S]*?"""|#.*', "", source)
    assert "https://arxiv.org/abs/1706.03762" in source
    names = {}
    exec(source, names)
    copied, x = make(names["PackedAttention"], E, H), draw(L, N, E)
    assert torch.equal(copied(x, x, x)[0], make(PackedAttention, E, H)(x, x, x)[0])


def blocks():
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_runs_and_prints_what_it_says():
    torch.manual_seed(0)
    names, printed, said, before = {}, io.StringIO(), [], torch.get_default_dtype()
    try:
        for block in blocks():
            found = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
            assert len(found) == block.count("print(") > 0
            said += found
            with contextlib.redirect_stdout(printed):
                exec(block, names)
    finally:
        torch.set_default_dtype(before)
    assert printed.getvalue().splitlines() == said
    assert len(said) > 10
