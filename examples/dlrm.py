"""A recommendation model (DLRM): embedding bags of different lengths, products of pairs, two small networks.

    python dlrm.py
    python dlrm.py --rows 1000000 --tables 26 --batch 8192 --device cuda
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class DLRM(nn.Module):
    def __init__(self, rows: int, tables: int, dense: int, dim: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        for bag in self.bags:
            nn.init.normal_(bag.weight, std=0.1)
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + tables * (tables + 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        low = self.bottom(dense)
        features = torch.stack([low, *(bag(i, o) for bag, i, o in zip(self.bags, indices, offsets))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([low, products], 1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--tables", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = DLRM(args.rows, args.tables, dense=13, dim=16).to(args.device)
    compiled = torch.compile(model, backend="flambeau", dynamic=True)  # the bags have different lengths every time
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    losses = []
    for _ in range(args.steps):
        counts = [torch.randint(1, 6, (args.batch,)) for _ in range(args.tables)]
        offsets = [(n.cumsum(0) - n).to(args.device) for n in counts]
        indices = [torch.randint(args.rows, (int(n.sum()),)).to(args.device) for n in counts]
        dense = torch.randn(args.batch, 13, device=args.device)
        clicked = (dense[:, 0] > 0).float()  # something to learn
        loss = F.binary_cross_entropy_with_logits(compiled(dense, indices, offsets), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
