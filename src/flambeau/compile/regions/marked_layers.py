"""`flambeau.mark_layers`: marks repeated layers of a model, so that Dynamo traces them once.

The search for repeated regions begins after Dynamo has traced every layer. Dynamo itself can trace a repeated layer
once if it is told that the layers are alike. Its mark for that is `torch.compiler.nested_compile_region`, from torch
2.13 on; earlier versions trace every layer regardless. Dynamo must be able to take a marked layer as a whole: no graph
breaks, no side effects. And Dynamo only guards the attributes of the first layer: `layers[3].norm.eps = 0.1` after
compilation goes unnoticed (torch 2.13). So marking is left to the user, here with one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flambeau.config import config

MARKED = "_flambeau_marked"


def mark_layers(model: nn.Module) -> list[str]:
    """Mark layer classes that repeat in a model, so that Dynamo traces each once. Returns the names of the classes.

        flambeau.mark_layers(model)
        torch.compile(model, backend="flambeau")

    The mark is on the class, and only has an effect under torch.compile. After compilation, do not change attributes of
    single layers.
    """
    names: list[str] = []
    pending = [model]
    while pending:
        module = pending.pop()
        alike: dict[Any, list[nn.Module]] = {}
        for child in module.children():
            alike.setdefault(structure(child), []).append(child)
        for layers in alike.values():
            kind = type(layers[0])
            inside = next(layers[0].children(), None)
            if len(layers) >= config.region_count and inside is not None and not isinstance(layers[0], nn.Sequential):
                if MARKED not in vars(kind):
                    kind.forward = torch.compiler.nested_compile_region(kind.forward)
                    setattr(kind, MARKED, True)
                names.append(kind.__name__)
            else:
                pending += layers
    return list(dict.fromkeys(names))


def structure(module: nn.Module) -> Any:
    """What two layers must have in common to be alike: their classes, and the metadata of parameters and buffers."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return (tuple((name, type(m)) for name, m in module.named_modules()),
            tuple((name, tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in tensors))
