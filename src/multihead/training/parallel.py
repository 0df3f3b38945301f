"""Data parallel: the processes that `torchrun` starts, each with its share of every step.

DDP keeps the whole model in each process; FSDP2 keeps a shard of it, and gathers a block's parameters while it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import bad_value

WAYS = ("ddp", "fsdp")


class UnequalProcesses(Exception):
    """The processes of a parallel run were not started alike."""


@dataclass(frozen=True)
class Processes:
    """This process and the others of a parallel run. The plain one is alone."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0  # on this machine: the number of its GPU
    started: bool = False  # by torchrun, so that there is a way to reach the others

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Its own device of a kind: each process has a GPU of its own."""
        device = torch.device(name)
        return torch.device("cuda", self.local_rank) if self.started and device.type == "cuda" else device

    def wrap(self, model: nn.Module, way: str | None, device: torch.device) -> nn.Module:
        """The model as it is called in training, so that gradients come out averaged over all processes."""
        if not self.started:
            return model
        if way == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (self.count,))
            for block in _blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model
        return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def reducing(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around a forward and backward pass: gradients are exchanged after the last of a step's passes alone."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext() if last else model.no_sync()
        if self.started:
            model.set_requires_gradient_sync(last)  # type: ignore[operator]  # fully_shard gave the model this method
        return nullcontext()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.started:
            torch.distributed.all_reduce(value)
        return value

    def most(self, value: int, device: torch.device) -> int:
        """The largest of all processes' values."""
        if not self.started:
            return value
        found = torch.tensor(value, device=device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return int(found)

    def share(self, text: str) -> str:
        """The first process's text, in every process."""
        if not self.started:
            return text
        texts = [text]
        torch.distributed.broadcast_object_list(texts)
        return texts[0]

    def agree(self, text: str, device: torch.device) -> None:
        """Raise UnequalProcesses, in all of them, if one has another text."""
        if self.most(int(self.share(text) != text), device):
            raise UnequalProcesses(
                "--parallel: expected the same options and text in all processes, got others in some."
            )

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor's whole value on the CPU, from the shards of all processes if it is sharded."""
        full = getattr(tensor, "full_tensor", None)
        return (tensor if full is None else full()).detach().cpu().clone()

    def like(self, whole: Tensor, tensor: Tensor) -> Tensor:
        """A copy of a whole value, placed and sharded like another tensor."""
        placements = getattr(tensor, "placements", None)
        if placements is None:
            return whole.to(tensor.device, copy=True)
        from torch.distributed.tensor import distribute_tensor

        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        return distribute_tensor(whole.to(mesh.device_type), mesh, placements)


def processes_here(way: str | None) -> Processes:
    """What `torchrun` said about this process, in the environment. Nothing is started.

    Raises:
        ValueError: a way of running in parallel was asked for, and torchrun was not used.
    """
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    # Other launchers set some of these too; without an address there is nobody to reach.
    meeting = all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if meeting and all(value.isdigit() for value in found):
        rank, count, local_rank = (int(value) for value in found)
        return Processes(rank, count, local_rank, started=True)
    if way is not None:
        instead = "Write torchrun --nproc-per-node 2 -m multihead.cli in place of multihead."
        raise bad_value("--parallel", "a run of torchrun", "a single process", "", instead)
    return Processes()


@contextmanager
def joined(processes: Processes, device: str) -> Generator[None, None, None]:
    """Joined to the other processes, with nccl on GPUs and gloo elsewhere. Nothing is done for one that is alone."""
    if not processes.started or torch.distributed.is_initialized():
        yield
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(processes.local_rank)
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def leave(processes: Processes, code: int) -> int:
    """An exit code back; of several processes none comes back, each ends here."""
    if processes.started:
        # Not through the interpreter's end, where a thread of gloo that still frees a tensor aborts the process:
        # https://github.com/pytorch/pytorch/pull/179291
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: what is gathered and freed as one."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from _blocks(child)
