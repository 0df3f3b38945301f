"""`doctor`: what is installed here, and whether each kernel gives right numbers on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from multihead import reference
from multihead.attention import KERNELS, attention
from multihead.kernels import library
from multihead.masks import Mask, causal, documents
from multihead.request import make_request


@dataclass(frozen=True)
class KernelHealth:
    """How a kernel did. `ok` is None where it can't run on this machine."""

    name: str
    ok: bool | None
    said: str


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found. Print it, or read its fields; `healthy` is False if a kernel gave wrong numbers."""

    facts: dict[str, str]
    kernels: list[KernelHealth]

    @property
    def healthy(self) -> bool:
        return all(kernel.ok is not False for kernel in self.kernels)

    def __str__(self) -> str:
        lines = [f"{name:<10} {fact}" for name, fact in self.facts.items()]
        marks = {True: "ok", False: "WRONG", None: "-"}
        lines += ["", "kernels, each run on a tiny input and held against the reference:"]
        return "\n".join(
            lines + [f"  {kernel.name:<10} {marks[kernel.ok]:<6} {kernel.said}" for kernel in self.kernels]
        )


def doctor() -> Diagnosis:
    """What is installed here, and each kernel after really running it on a tiny input, forward and backward."""
    from multihead import __version__  # here, as the package itself imports this file

    devices = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    facts = {
        "multihead": __version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "threads": f"{torch.get_num_threads()} in an operation, {torch.get_num_interop_threads()} between operations",
        "devices": ", ".join(devices),
        "native": _native(),
    }
    devices_of_autocast = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:  # the same answer wherever it is asked
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in devices_of_autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        return Diagnosis(facts, [_try(name) for name in KERNELS])


def _native() -> str:
    """The native library: which kernels of it are taken, or why there are none."""
    if not library.available():
        return f"none: {library.why_not()}"
    return f"{library.isa()} (this CPU has {', '.join(library.isas())})"


def _try(name: str) -> KernelHealth:
    """Run a kernel on the first device, dtype and mask that it accepts."""
    reasons: list[str] = []
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    ids = torch.tensor([0] * 13 + [1] * 19)
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16):
            for mask in (causal(), causal() & documents(ids.to(device))):
                generator = torch.Generator(device).manual_seed(0)
                q, k, v = (
                    torch.randn(1, h, 32, 16, generator=generator, device=device, dtype=dtype) for h in (4, 2, 2)
                )
                request = make_request(q, k, v, mask, None, None, None, 0.0, None, None, False, reference.attention)
                reasons = KERNELS[name].refusals(request)
                if not reasons:
                    return _run(name, (q, k, v), mask)
    return KernelHealth(name, None, f"can't run here: {'; '.join(reasons)}")


def _run(name: str, qkv: tuple[torch.Tensor, ...], mask: Mask) -> KernelHealth:
    where = f"{qkv[0].device.type}, {str(qkv[0].dtype).removeprefix('torch.')}"
    try:
        ours, exact = (_answers(compute, qkv, mask) for compute in (_by_kernel(name), _by_reference))
        errors = [float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(ours, exact, strict=True)]
    except Exception as error:  # whatever a kernel raises is what the user wants to read here
        return KernelHealth(name, False, f"{where}: {type(error).__name__}: {error}")
    allowed = 64 * torch.finfo(qkv[0].dtype).eps
    ok = all(error <= allowed for error in errors)  # False for NaN too
    return KernelHealth(name, ok, f"{where}: largest error {max(errors):.1e}, forward and backward")


def _answers(compute: Callable[..., torch.Tensor], qkv: tuple[torch.Tensor, ...], mask: Mask) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in qkv]
    out = compute(*leaves, mask)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def _by_kernel(name: str) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, mask: attention(q, k, v, mask, kernel=name)


def _by_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    return reference.attention(q, k, v, mask).out
