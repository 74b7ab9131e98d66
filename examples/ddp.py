"""Data-parallel training on torch.device("flambeau"), started with torchrun.

    torchrun --standalone --nproc-per-node=2 ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flambeau


def main() -> None:
    flambeau.enable_device()
    dist.init_process_group("flambeau")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to("flambeau")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(rank)  # each process has its own data
    x = torch.randn(64, 8)
    y = x[:, :2].prod(1, keepdim=True)
    x, y = x.to("flambeau"), y.to("flambeau")
    losses = []
    for _ in range(5):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # gradients are averaged over the processes
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(others, mine)
    assert all(torch.equal(o.cpu(), mine.cpu()) for o in others)
    if rank == 0:
        print(f"{world} processes, loss {losses[0]:.3f} -> {losses[-1]:.3f}, the same weights in each")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
