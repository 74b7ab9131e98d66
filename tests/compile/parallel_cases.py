"""Programs that test_parallel.py starts by torchrun: compiled models on several processes give the same as eager.

    torchrun --nproc-per-node=4 tests/compile/parallel_cases.py cpu ddp fsdp tensor_parallel
    torchrun --nproc-per-node=2 tests/compile/parallel_cases.py flambeau loader ddp fsdp tensor_parallel offloaded
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flambeau
from flambeau.compile import offload

DIM, BATCH, STEPS = 16, 8, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Sequential):
    """Layers in one graph. Dynamo does not trace torch's own `forward` if a wrapper like DDP calls it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def network() -> Network:
    torch.manual_seed(3)
    return Network(*(Layer() for _ in range(3)), nn.Linear(DIM, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, DIM, generator=generator), torch.randint(4, (BATCH,), generator=generator)


def batches(device: str, rank: int, world: int) -> Iterator[tuple[Tensor, ...]]:
    for step in range(STEPS):
        yield tuple(t.chunk(world)[rank].to(device) for t in batch(step))


def trained(model: nn.Module, data: Iterator[tuple[Tensor, ...]], run: Callable[..., Tensor] | None = None
            ) -> list[float]:
    """Trains a model on the data and returns the losses."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for x, y in data:
        optimiser.zero_grad()
        loss = F.cross_entropy((model if run is None else run)(x), y)
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    return losses


def whole(p: Tensor) -> Tensor:
    found: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p  # type: ignore[operator]
    return found.detach().cpu()


def compare(device: str, rank: int, world: int, spread: Callable[[nn.Module], nn.Module], parts: bool = True,
            **options: Any) -> None:
    """Compares losses and parameters with eager in the same processes, and parameters with one process on the CPU."""
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = spread(network().to(device))
        run = torch.compile(model, backend="flambeau", options=options) if compiled else None
        data = batches(device, rank, world) if parts else batches(device, 0, 1)
        counters.clear()
        found.append((trained(model, data, run), [whole(p) for p in model.parameters()]))
        assert compiled == (counters["stats"]["unique_graphs"] > 0)
    alone = network()
    trained(alone, batches("cpu", 0, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1][1], [p.detach() for p in alone.parameters()], rtol=1e-4, atol=1e-5)


def ddp(device: str, rank: int, world: int) -> None:
    for cap in (25, 0.002):  # one bucket, then several, between which Dynamo splits the graph
        compare(device, rank, world, partial(DistributedDataParallel, bucket_cap_mb=cap))


def fsdp(device: str, rank: int, world: int) -> None:
    mesh = dist.device_mesh.init_device_mesh(device, (world,))

    def spread(model: nn.Module) -> nn.Module:
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    compare(device, rank, world, spread)


def tensor_parallel(device: str, rank: int, world: int) -> None:
    mesh = dist.device_mesh.init_device_mesh(device, (world,))

    def spread(model: nn.Module) -> nn.Module:
        for layer in model[:-1]:  # type: ignore[index]
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    compare(device, rank, world, spread, parts=False)


def loader(device: str, rank: int, world: int) -> None:
    """Trains with batches that are copied on a side stream, one step before they are used."""
    side, late = torch.Stream(device=device), torch.randn(384, 384, device=device)

    def ahead() -> Iterator[tuple[Tensor, ...]]:
        here = torch.accelerator.current_stream()
        coming: tuple[Tensor, ...] | None = None
        for step in range(STEPS + 1):
            ready = coming
            if ready is not None:
                here.wait_stream(side)
                for t in ready:
                    t.record_stream(here)
            if step < STEPS:
                with side:
                    for _ in range(4):  # delay the copies
                        late.copy_(late @ late * 1e-3)
                    coming = tuple(t.to(device, non_blocking=True) for t in batch(step))
            if ready is not None:
                yield ready

    for options in ({}, {"streams": "auto"}, {"offload": 0.5}):
        model, alone = network().to(device), network()
        run = torch.compile(model, backend="flambeau", options=options)
        losses = trained(model, ahead(), run), trained(alone, batches("cpu", 0, 1))
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        torch.compiler.reset()


def offloaded(device: str, rank: int, world: int) -> None:
    """Keeps saved tensors on the host, in every bucket of DDP and every part of FSDP2."""
    offload.LEAST, offload.COPIES = 1, 0
    compare(device, rank, world, lambda model: DistributedDataParallel(model, bucket_cap_mb=0.002), offload=0.5)
    mesh = dist.device_mesh.init_device_mesh(device, (world,))
    compare(device, rank, world, lambda model: fully_shard(model, mesh=mesh), offload=0.5)


def automatic(device: str, rank: int, world: int) -> None:
    compare(device, rank, world, DistributedDataParallel, streams="auto")


def communication(device: str, rank: int, world: int) -> None:
    """The sums of one bucket's gradients are under way while the backward of the next one runs, as a trace shows."""
    wide = 768
    torch.manual_seed(3)
    layers = [m for _ in range(6) for m in (nn.Linear(wide, wide), nn.ReLU())]
    model = DistributedDataParallel(Network(*layers).to(device), bucket_cap_mb=2)
    run = torch.compile(model, backend="flambeau")
    x = torch.randn(256, wide).to(device)
    for _ in range(3):  # DDP orders its buckets anew after the first step
        run(x).sum().backward()
    with torch.profiler.profile() as seen:
        run(x).sum().backward()
        torch.accelerator.synchronize() if device != "cpu" else None
    spans: dict[str, list[tuple[float, float]]] = {"gloo:all_reduce": [], "CompiledFunctionBackward": []}
    for event in seen.events():
        if event.name in spans:
            spans[event.name].append((event.time_range.start, event.time_range.end))
    sums, computed = spans.values()
    beside = sum(begin < start < end for begin, end in sums for start, _ in computed)
    assert len(sums) >= 4 and len(computed) >= 4 and beside >= 2, sorted({e.name for e in seen.events()})


def main(device: str, *names: str) -> None:
    logging.getLogger("flambeau").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000  # so that small models have several buckets
    if device == "flambeau":
        flambeau.enable_device()
    dist.init_process_group("gloo" if device == "cpu" else device)
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in names:
        globals()[name](device, rank, world)
        dist.barrier()
        if rank == 0:
            print(f"{name} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
