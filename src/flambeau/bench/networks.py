"""The large networks of bench/compiled.py, in the dtypes in which they are trained.

    built = NETWORKS["lm24"].build("tiny", device="cpu", dtype=torch.float32)

"large" is for step times on a GPU, "medium" for many steps there, "small" for steps on a CPU, "tiny" for tests (of
`lm24`, deep enough to have regions).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from flambeau.bench import models
from flambeau.bench.models import Block, Model


def with_dropout(module: nn.Module, p: float = 0.1) -> nn.Module:
    """Adds dropout where such networks have it: after the halves of transformer blocks, or before the last layer."""
    for part in module.modules():
        if isinstance(part, Block):
            part.proj = nn.Sequential(part.proj, nn.Dropout(p))  # type: ignore[assignment]
            part.mlp = nn.Sequential(*part.mlp, nn.Dropout(p))
        elif isinstance(part, models.ResNet50):
            part.head = nn.Sequential(nn.Dropout(p), part.head)  # type: ignore[assignment]
        elif isinstance(part, models.DLRM):
            part.top.insert(2, nn.Dropout(p))
    return module


NETWORKS: dict[str, Model] = {model.name: model for model in (
    Model("lm24", models.GPT, models.draw_tokens, models.token_loss, {
        "large": {"batch": 8, "vocab": 32768, "time": 1024, "dim": 1024, "heads": 16, "depth": 24},
        "medium": {"batch": 8, "vocab": 8192, "time": 256, "dim": 512, "heads": 8, "depth": 24},
        "small": {"batch": 2, "vocab": 4096, "time": 128, "dim": 256, "heads": 4, "depth": 24},
        "tiny": {"batch": 2, "vocab": 64, "time": 16, "dim": 32, "heads": 2, "depth": 7}}),
    Model("resnet50", models.ResNet50, models.draw_images, models.class_loss, {
        "large": {"batch": 128, "image": 224, "width": 64, "stages": 4, "classes": 1000},
        "medium": {"batch": 32, "image": 160, "width": 64, "stages": 4, "classes": 1000},
        "tiny": {"batch": 2, "image": 32, "width": 8, "stages": 1, "classes": 10}}),
    Model("vit", models.ViT, models.draw_images, models.class_loss, {
        "large": {"batch": 64, "image": 224, "patch": 16, "dim": 768, "heads": 12, "depth": 12, "classes": 1000},
        "medium": {"batch": 32, "image": 224, "patch": 16, "dim": 384, "heads": 6, "depth": 12, "classes": 1000},
        "tiny": {"batch": 2, "image": 16, "patch": 4, "dim": 32, "heads": 2, "depth": 2, "classes": 10}}),
    Model("dlrm", models.DLRM, models.draw_clicks, F.binary_cross_entropy_with_logits, {
        "large": {"batch": 16384, "tables": 16, "rows": 100000, "bag": 16, "dense": 13, "dim": 64},
        "medium": {"batch": 8192, "tables": 16, "rows": 100000, "bag": 16, "dense": 13, "dim": 64},
        "tiny": {"batch": 4, "tables": 3, "rows": 50, "bag": 3, "dense": 5, "dim": 8}}),
    Model("unet3d", models.UNet3D, models.draw_volumes, models.class_loss, {
        "large": {"batch": 2, "side": 96, "width": 32, "levels": 4, "classes": 4},
        "medium": {"batch": 2, "side": 64, "width": 32, "levels": 4, "classes": 4},
        "tiny": {"batch": 2, "side": 8, "width": 4, "levels": 2, "classes": 3}}),
)}
DTYPES = dict.fromkeys(("lm24", "resnet50", "vit"), torch.bfloat16) | dict.fromkeys(("dlrm", "unet3d"), torch.float32)
