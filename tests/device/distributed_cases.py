"""What test_distributed.py starts twice, by torchrun: collectives, DDP and FSDP2 on the device."""

from __future__ import annotations

import copy
import logging
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flambeau

DEV = "flambeau"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)
MOVED = (*DTYPES, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.cpu().float(), b.cpu().float(), rtol=0, atol=0)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 3 + 5 * rank) % 11).reshape(shape).to(dtype)


def reductions(rank: int, world: int) -> None:
    for dtype in DTYPES:
        every = [values(r, 4, 3, dtype=dtype) for r in range(world)]
        x = every[rank].to(DEV)
        dist.all_reduce(x)
        same(x, sum(every))
        view = every[rank].to(DEV).t()[1:]  # a part of a tensor, and not in its order
        dist.all_reduce(view, dist.ReduceOp.MAX)
        same(view, torch.stack([e.t()[1:] for e in every]).amax(0))
        out = torch.empty(4 // world, 3, dtype=dtype, device=DEV)
        dist.reduce_scatter_tensor(out, every[rank].to(DEV))
        same(out, sum(every).chunk(world)[rank])
        dist.reduce_scatter(out, list(every[rank].to(DEV).chunk(world)))
        same(out, sum(every).chunk(world)[rank])
    every = [values(r, 4) for r in range(world)]
    x = every[rank].to(DEV)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    same(x, sum(every) / world)
    out = torch.empty(4 // world, device=DEV)
    dist.reduce_scatter_tensor(out, every[rank].to(DEV), op=dist.ReduceOp.AVG)
    same(out, (sum(every) / world).chunk(world)[rank])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    for _ in range(2):  # options stay as they were given
        x = every[rank].to(DEV)
        dist.group.WORLD.allreduce([x], options).wait()
        same(x, sum(every) / world)
    try:
        dist.all_reduce(x, torch.distributed._make_nccl_premul_sum(2.0))
    except flambeau.UnsupportedError as error:
        assert "set_force_sum_reduction_for_comms" in str(error)
    else:
        raise AssertionError("no error")
    x = every[rank].to(DEV)
    dist.reduce(x, dst=1)
    if rank == 1:
        same(x, sum(every))
    xs = [every[rank].to(DEV), (every[rank] * 2).to(DEV)]
    dist.all_reduce_coalesced(xs)
    same(xs[0], sum(every))
    same(xs[1], 2 * sum(every))
    host = every[rank].clone()
    dist.all_reduce(host)  # of the CPU
    same(host, sum(every))
    work = dist.all_reduce(x := every[rank].to(DEV), async_op=True)
    (got,) = work.get_future().wait()
    assert got.device.type == DEV and work.is_completed()
    same(x, sum(every))


def moves(rank: int, world: int) -> None:
    for dtype in MOVED:
        every = [values(r, 4, 3, dtype=dtype) for r in range(world)]
        x = every[rank].to(DEV)
        dist.broadcast(x, src=1)
        same(x, every[1])
        outs = [torch.empty(4, 3, dtype=dtype, device=DEV) for _ in range(world)]
        dist.all_gather(outs, every[rank].to(DEV))
        for out, wanted in zip(outs, every):
            same(out, wanted)
        whole = torch.empty(4 * world, 3, dtype=dtype, device=DEV)
        dist.all_gather_into_tensor(whole, every[rank].to(DEV))
        same(whole, torch.cat(every))
        outs = [torch.empty(4, 3, dtype=dtype, device=DEV) for _ in range(world)]
        dist.gather(every[rank].to(DEV), outs if rank == 0 else None, dst=0)
        if rank == 0:
            same(torch.stack(outs), torch.stack(every))
        out = torch.empty(4, 3, dtype=dtype, device=DEV)
        dist.scatter(out, [e.to(DEV) for e in every] if rank == 1 else None, src=1)
        same(out, every[rank])
        out = torch.empty(4, 3, dtype=dtype, device=DEV)
        dist.all_to_all_single(out, every[rank].to(DEV))
        same(out, torch.cat([e.chunk(world)[rank] for e in every]))
    # Parts of different lengths: one row for process 0, the rest for process 1.
    every = [values(r, 3, 2) for r in range(world)]
    sizes = [1, 2]
    out = torch.empty(world * sizes[rank], 2, device=DEV)
    dist.all_to_all_single(out, every[rank].to(DEV), [sizes[rank]] * world, sizes)
    same(out, torch.cat([e.split(sizes)[rank] for e in every]))
    outs = [torch.empty(sizes[rank], 2, device=DEV) for _ in range(world)]
    dist.all_to_all(outs, list(every[rank].to(DEV).split(sizes)))
    same(torch.cat(outs), torch.cat([e.split(sizes)[rank] for e in every]))


def messages(rank: int, world: int) -> None:
    x, got = values(rank, 5).to(DEV), torch.empty(5, device=DEV)
    if rank == 0:
        dist.send(x, 1)
        assert dist.recv(got) == 1  # from anybody
    else:
        dist.recv(got, 0)
        dist.send(x, 0)
    same(got, values(1 - rank, 5))
    incoming, outgoing = dist.irecv(got, 1 - rank, tag=3), dist.isend(x * 2, 1 - rank, tag=3)
    outgoing.wait()
    incoming.wait()
    same(got, 2 * values(1 - rank, 5))
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]
    dist.barrier()


def groups(rank: int, world: int) -> None:
    alone = [dist.new_group([r]) for r in range(world)][rank]
    x = values(rank, 3).to(DEV)
    dist.all_reduce(x, group=alone)
    same(x, values(rank, 3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16))
        self.head, self.other = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        return (self.other if other else self.head)(self.layers(x))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def trained(model: nn.Module, steps: int, device: str, rank: int, world: int, unused: bool = False) -> nn.Module:
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        x, y = (t.chunk(world)[rank].to(device) for t in data(step))
        optimiser.zero_grad()
        F.cross_entropy(model(x, unused and step % 2 == 0), y).backward()
        optimiser.step()
    return model


def ddp(rank: int, world: int) -> None:
    for unused, options in ((True, {"find_unused_parameters": True}), (False, {"gradient_as_bucket_view": True}),
                            (False, {"bucket_cap_mb": 0.0005, "static_graph": True})):
        torch.manual_seed(rank)  # DDP starts from what process 0 has
        model = Model()
        if not unused:
            del model.other
        twin = copy.deepcopy(model).to(DEV)
        start = [copy.deepcopy(model) if rank == 0 else None]
        dist.broadcast_object_list(start, src=0)
        alone = trained(start[0], 3, "cpu", 0, 1, unused)
        together = trained(DistributedDataParallel(twin, **options), 3, DEV, rank, world, unused)
        for a, b in zip(together.module.parameters(), alone.parameters(), strict=True):
            assert a.device.type == DEV
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
        dist.barrier()


def fsdp(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = Model()
    del model.other
    alone = trained(copy.deepcopy(model), 3, "cpu", 0, 1)
    model = model.to(DEV)
    mesh = dist.device_mesh.init_device_mesh(DEV, (world,))
    for layer in (model.layers, model.head):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    together = trained(model, 3, DEV, rank, world)
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        assert a.to_local().shape[0] < b.shape[0] or b.shape[0] == 1
        torch.testing.assert_close(a.full_tensor().cpu(), b, rtol=1e-4, atol=1e-5)


def main(backend: str, *names: str) -> None:
    logging.getLogger("flambeau").setLevel(logging.ERROR)
    flambeau.enable_device()
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in names:
        globals()[name](rank, world)
        if rank == 0:
            print(f"{name} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
