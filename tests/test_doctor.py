"""`doctor`: what it says of this machine, and that it notices a kernel that is wrong."""

from __future__ import annotations

import platform

import pytest
import torch

import multihead as mh
from cases import NATIVE
from multihead.doctor import KernelHealth
from multihead.kernels import library, sdpa


def by_name(found: mh.Diagnosis) -> dict[str, KernelHealth]:
    return {kernel.name: kernel for kernel in found.kernels}


def test_facts(native):
    facts = mh.doctor().facts
    assert list(facts) == ["multihead", "torch", "python", "threads", "devices", "native"]
    assert facts["multihead"] == mh.__version__
    assert facts["torch"] == torch.__version__
    assert facts["python"].startswith(platform.python_version())
    assert facts["threads"].startswith(f"{torch.get_num_threads()} ")
    assert facts["devices"].startswith("cpu (")
    assert ("cuda" in facts["devices"]) == torch.cuda.is_available()
    assert facts["native"].startswith(f"{library.isa()} " if native else "none: this test does without")


def test_every_kernel_is_tried(native):
    found = mh.doctor()
    assert found.healthy
    kernels = by_name(found)
    assert list(kernels) == list(mh.KERNELS)
    for name in ("sdpa", "blocks", "reference", *(["native"] if native else [])):
        assert kernels[name].ok is True
        assert kernels[name].said.startswith("cpu, float32: largest error ")
    if not native:
        assert kernels["native"].ok is None
        assert "this test does without" in kernels["native"].said
    for name in ("flex", "varlen"):
        if not torch.cuda.is_available():
            assert kernels[name].ok is None
            assert kernels[name].said.startswith("can't run here: ")
            assert "CUDA only" in kernels[name].said
    text = str(found)
    for name, fact in found.facts.items():
        assert f"{name} " in text
        assert fact in text
    for kernel in found.kernels:
        assert f"{kernel.name} " in text
        assert kernel.said in text
    assert "WRONG" not in text


def shifted(out, lse):
    return out + 1e-3, lse


def scaled_gradient(out, lse):
    """Right numbers, and a gradient that is too large by a hundredth."""
    return out + (out - out.detach()) * 0.01, lse


def not_a_number(out, lse):
    return out * torch.nan, lse


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, out):
        return out.clone()

    @staticmethod
    def backward(_ctx, grad):
        return grad * torch.nan


def nan_gradient(out, lse):
    return _NanGradient.apply(out), lse


def other_shape(out, lse):
    return out[:, :, :1], lse


def no_gradient(out, lse):
    return out.detach(), lse


def broken(_out, _lse):
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("name", [NATIVE, "sdpa", "blocks"])
@pytest.mark.parametrize(
    "change", [shifted, scaled_gradient, not_a_number, nan_gradient, other_shape, no_gradient, broken]
)
def test_a_wrong_kernel_is_noticed(name, change, monkeypatch):
    kernel = mh.KERNELS[name]
    right = kernel.run
    monkeypatch.setattr(kernel, "run", lambda request: change(*right(request)))
    found = mh.doctor()
    assert not found.healthy
    assert {name for name, health in by_name(found).items() if health.ok is False} == {kernel.NAME}
    (line,) = (line for line in str(found).splitlines() if "WRONG" in line)
    assert line.split()[:2] == [kernel.NAME, "WRONG"]
    if change is broken:
        assert line.endswith("ZeroDivisionError: planted")


def test_a_kernel_that_can_not_run_is_not_wrong(monkeypatch):
    monkeypatch.setattr(sdpa, "refusals", lambda _: ["it is broken here"])
    found = mh.doctor()
    assert found.healthy
    assert by_name(found)["sdpa"] == KernelHealth("sdpa", None, "can't run here: it is broken here")


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_it_does_not_matter_where_it_is_asked(mode):
    with mode():
        found = mh.doctor()
    assert found.healthy, str(found)


def test_nothing_is_changed():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert mh.doctor().healthy
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
