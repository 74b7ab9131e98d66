"""A residual network in channels-last layout, trained in bfloat16. Results have the same layout as in eager.

    python resnet.py
    python resnet.py --image 224 --width 64 --batch 64 --steps 50
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.short(x)).relu()  # norm, sum and relu are one kernel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    w = args.width
    model = nn.Sequential(nn.Conv2d(3, w, 3, 1, 1, bias=False), Residual(w, w, 1), Residual(w, 2 * w, 2),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * w, 10))
    model = model.to(args.device, memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="flambeau")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    x = torch.randn(args.batch, 3, args.image, args.image, device=args.device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (args.batch,), device=args.device)
    losses = []
    for _ in range(args.steps):
        with torch.autocast(args.device, torch.bfloat16):
            loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0]
    assert model[1].conv1.weight.is_contiguous(memory_format=torch.channels_last)


if __name__ == "__main__":
    main()
