"""Derivatives of derivatives of the native kernel, torch.func, and what is saved for the backward pass."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import reference
from multihead.kernels import library
from multihead.weights import Look, attention_with_weights
from native_calls import OPTIONS, B, L, S, bf16, close, f32, f64, forward_mode, leaves, loss, native

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")


# Derivatives of derivatives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_three_derivatives_are_those_of_the_reference(name):
    more, options = OPTIONS[name]
    answers = []
    for dtype in (f32, f64):
        given = leaves(*more)
        given = {n: t.detach().to(dtype).requires_grad_() for n, t in given.items()}
        if dtype == f32:
            total = loss(*native(given, **options))
        else:
            by = reference.attention(**given, **options)
            total = by.out.sin().square().sum() + (by.lse.masked_fill(by.lse == -torch.inf, 0.0) * 0.3).cos().sum()
        orders = []
        for _ in range(3):
            grads = torch.autograd.grad(total, list(given.values()), create_graph=True)
            orders += grads
            total = sum((g * (0.1 * i + 1)).square().sum() for i, g in enumerate(grads))
        answers.append(orders)
    assert all(grad.abs().max() > 1e-6 for grad in answers[1])
    close(*answers, off=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_gradient_is_the_same_whether_it_can_be_differentiated_again_or_not(name):
    more, options = OPTIONS[name]
    given = leaves(*more, dtype=bf16 if not more else f32)
    plain, again = (
        torch.autograd.grad(loss(*native(given, **options)), list(given.values()), create_graph=graph)
        for graph in (False, True)
    )
    assert all(grad.requires_grad for grad in again)
    close(again, plain, off=2e-5 if more else 1e-2)


@pytest.mark.parametrize("name", ["plain", "alibi", "learned bias"])
def test_many_gradients_at_once(name):
    more, options = OPTIONS[name]
    given = leaves(*more)
    out, lse = native(given, **options)
    above = [torch.randn(3, *y.shape) for y in (out, lse)]
    inputs = list(given.values())
    found = torch.autograd.grad((out, lse), inputs, above, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad((out, lse), inputs, [a[i] for a in above], retain_graph=True) for i in range(3)]
    close(found, [torch.stack(grads) for grads in zip(*each, strict=True)])


# torch.func -----------------------------------------------------------------------------------------------------------


@forward_mode
def test_transforms_are_left_to_the_definition_and_refused_by_name():
    q, k, v = (t.detach() for t in leaves().values())
    exact = reference.attention(q, k, v, mh.causal()).out

    def attend(kernel: str | None, *t: Tensor) -> Tensor:
        return mh.attention(*t, mh.causal(), kernel=kernel)

    def transformed(kernel: str | None) -> dict[str, Any]:
        return {
            "vmap": lambda: torch.vmap(lambda *t: attend(kernel, *t))(q, k, v),
            "grad": lambda: torch.func.grad(lambda q: attend(kernel, q, k, v).sum())(q),
            "jvp": lambda: torch.func.jvp(lambda q: attend(kernel, q, k, v), (q,), (q,)),
            "jacrev": lambda: torch.func.jacrev(lambda q: attend(kernel, q[:, :, :1], k, v).sum(-1))(q),
        }

    for name, call in transformed("native").items():
        with pytest.raises(mh.KernelRefusal, match=r"torch\.func transform"):
            call()
        transformed(None)[name]()
    close([torch.vmap(lambda *t: attend(None, *t))(q, k, v)], [exact])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(mh.KernelRefusal, match="forward-mode"):
            attend("native", q, k, dual)
        close([torch.autograd.forward_ad.unpack_dual(attend(None, q, k, dual)).primal], [exact])
        close([attend("native", q, k, v)], [exact])


def test_other_refusals():
    given = leaves()
    with pytest.raises(mh.KernelRefusal, match="float64: it computes in float32"):
        native({name: t.double() for name, t in given.items()})
    with pytest.raises(mh.KernelRefusal, match="meta: it runs on the CPU"):
        native({name: t.to("meta") for name, t in given.items()})
    with pytest.raises(ValueError, match="kernel"):
        mh.attention(**given, kernel="natives")


# What is saved --------------------------------------------------------------------------------------------------------

SAVED = ["q", "k", "v", "bias", "keep", "ids", "q_ids", "n", "prefix", "table", "q_at", "k_at"]


def with_everything(ids_dtype: torch.dtype = torch.int64) -> tuple[dict[str, Tensor], Any]:
    held = {name: t.detach().clone().requires_grad_() * 1 for name, t in leaves("bias").items()}
    held |= {"keep": torch.rand(B, S) < 0.9, "table": torch.rand(L, S) < 0.9}
    whole = {
        "ids": torch.arange(S) // 4,
        "q_ids": torch.arange(L) // 4,
        "n": torch.tensor([9, 11]),
        "prefix": torch.tensor([2, 3]),
    }
    whole |= {"q_at": torch.arange(L) + 6, "k_at": torch.arange(S)}
    held |= {name: t.to(ids_dtype) for name, t in whole.items()}
    mask = mh.causal() & mh.padding(held["keep"]) | mh.documents(held["ids"], q_ids=held["q_ids"]) & mh.lengths(
        held["n"]
    )
    mask = (mask | mh.prefix(held["prefix"])) & held["table"]
    tensors = {name: held[name] for name in ("q", "k", "v", "bias")}
    return held, native(tensors, mask=mask, q_positions=held["q_at"], k_positions=held["k_at"])


@pytest.mark.parametrize("name", SAVED)
def test_what_is_changed_before_its_backward_pass_is_noticed(name):
    held, (out, _) = with_everything()
    held[name].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("again", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("name", ["ids", "q_ids", "n", "prefix", "q_at", "k_at"])
def test_whole_numbers_that_are_read_as_others_are_noticed_or_kept(name, again):
    """int32 is read as int64: what is changed then is not what was read."""
    answers = []
    for changed in (False, True):
        held, answer = with_everything(torch.int32)
        if changed:
            held[name].zero_()
        inputs = [held[n] for n in ("q", "k", "v", "bias")]
        try:
            answers.append(torch.autograd.grad(loss(*answer), inputs, create_graph=again))
        except RuntimeError as error:
            if changed and "modified by an inplace operation" in str(error):
                return
            raise
    close(*answers)


def test_changing_the_output_in_place_is_torch_s_usual_error():
    out = native(leaves())[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_can_be_kept_and_is_freed_otherwise():
    given = leaves()
    inputs = list(given.values())
    out, _ = native(given, mask=mh.causal())
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), inputs), strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), inputs)


def test_hooks_on_saved_tensors():
    given = leaves("bias", length=65, keys=200)
    exact = torch.autograd.grad(loss(*native(given, mask=mh.causal(), dropout=0.0)), list(given.values()))
    largest = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel() if tensor.shape[-2:] != (65, 200) else 0)
        return tensor.clone()

    for hooks in (torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)):
        with hooks:
            answer = native(given, mask=mh.causal())
        found = torch.autograd.grad(loss(*answer), list(given.values()))
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    assert 0 < largest < 65 * 200


def test_calls_from_several_threads():
    """Scratch memory, masks and results are each thread's own."""
    masks = [None, mh.causal(), mh.window(left=5), mh.lengths([7, 190])]
    jobs = [
        (leaves(dtype=dtype, length=60 + n, keys=190 + n), mask)
        for n, mask in enumerate(masks)
        for dtype in (f32, bf16)
    ]
    together = threading.Barrier(4)

    def run(job: tuple[dict[str, Tensor], Any], wait: bool = False) -> list[Tensor]:
        given, mask = job
        if wait:
            together.wait(timeout=60)
        out, lse = native(given, mask=mask)
        return [out, lse, *torch.autograd.grad(loss(out, lse), list(given.values()))]

    alone = [run(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, want in zip(pool.map(lambda job: run(job, True), jobs), alone, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_mask_that_changes_before_a_gradient_of_the_weights_is_noticed():
    """It comes from the definition, which reads the caller's ids; the kernel had a copy of another dtype."""
    q, k = torch.randn(2, 1, 1, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind()
    ids = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)  # read as int64
    _, weights = attention_with_weights(q, k, k, mh.documents(ids), look=Look(average=False))
    weights.square().sum().backward(retain_graph=True)
    ids.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weights.square().sum().backward()
