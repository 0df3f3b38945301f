"""Sharded layers: tensor parallel by PyTorch's own plan, FSDP of the submodules; two processes of this machine."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from multihead import Attention, Rotary, causal

WORLD = 2

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


def _layer() -> Attention:
    torch.manual_seed(0)
    return Attention(24, 4, num_kv_heads=2, mask=causal(), position=Rotary()).split_projections().double()


def _work(rank: int, port: int, way: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        whole, sharded = _layer(), _layer()
        if way == "tensor parallel":
            plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
            parallelize_module(sharded, mesh, {**plan, "out_proj": RowwiseParallel()})
        else:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                fully_shard(getattr(sharded, name), mesh=mesh)
        x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        out, want = sharded(x), whole(x)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
        out.square().sum().backward()
        want.square().sum().backward()
        for (name, mine), theirs in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-11, msg=name)
    finally:
        dist.destroy_process_group()
    # Not through the interpreter's end, where a thread of gloo that still frees a tensor aborts the process:
    # https://github.com/pytorch/pytorch/pull/179291
    os._exit(0)


@pytest.mark.parametrize("way", ["tensor parallel", "fsdp"])
def test_a_sharded_layer_is_the_whole_one(way):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_work, (port, way), nprocs=WORLD)
