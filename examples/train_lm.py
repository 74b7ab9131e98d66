"""A language model trained with AdamW, in eager and compiled: with exact numerics, both are equal bit for bit.

    python train_lm.py                    # small, in seconds on any machine
    python train_lm.py --layers 12 --dim 512 --steps 200
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    def __init__(self, vocab: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # the bytes of this file
    length, batch = 32, 8

    def trained(compiled: bool) -> tuple[LM, list[float]]:
        torch.manual_seed(0)
        model = LM(256, length, args.dim, 4, args.layers).to(args.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run = torch.compile(model, backend="flambeau", options={"numerics": "eager"}) if compiled else model
        losses = []
        for _ in range(args.steps):
            at = torch.randint(len(text) - length - 1, (batch,))
            rows = torch.stack([text[i:i + length + 1] for i in at]).to(args.device)
            loss = F.cross_entropy(run(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return model, losses

    (eager, first), (ours, second) = trained(False), trained(True)
    print(f"loss {first[0]:.4f} -> {first[-1]:.4f} in eager, {second[0]:.4f} -> {second[-1]:.4f} compiled")
    different = sum((a != b).sum().item() for a, b in zip(eager.parameters(), ours.parameters()))
    print(f"{different} of {sum(p.numel() for p in eager.parameters()):,} parameters differ after {args.steps} steps")
    assert different == 0 and first == second


if __name__ == "__main__":
    main()
