"""Text generation with a static key-value cache: one program for all positions, compiled once.

    python decode.py
    python decode.py --layers 24 --dim 1024 --tokens 500 --device cuda    # with CUDA graphs
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import flambeau


class Layer(nn.Module):
    def __init__(self, batch: int, length: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("keys", torch.zeros(batch, heads, length, dim // heads))
        self.register_buffer("values", torch.zeros(batch, heads, length, dim // heads))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """One token of each row. The position is a tensor, so a new position does not recompile."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(1, 0).unsqueeze(3)
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        seen = torch.arange(self.keys.shape[2], device=x.device) <= at
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None, None, None])
        x = x + self.out(y.flatten(1))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab: int, batch: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(batch, length, dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.token(token) + self.place(at)
        for layer in self.layers:
            x = layer(x, at)
        return self.head(x).argmax(-1)


@torch.no_grad()
def generate(step: nn.Module, first: torch.Tensor, tokens: int) -> torch.Tensor:
    out = [first]
    for k in range(tokens):
        out.append(step(out[-1], torch.tensor([k], device=first.device)).clone())
    return torch.stack(out, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Decoder(64, 2, args.tokens + 1, args.dim, 4, args.layers).to(args.device).eval()
    first = torch.tensor([1, 2], device=args.device)
    eager = generate(model, first, args.tokens)
    with flambeau.debug.collect() as graphs:
        compiled = torch.compile(model, backend="flambeau", options={"graphs": args.device == "cuda"})
        ours = generate(compiled, first, args.tokens)
    print(f"{args.tokens} tokens, {len(graphs)} graph(s) compiled\n{ours.tolist()[0]}")
    assert torch.equal(ours, eager)


if __name__ == "__main__":
    main()
