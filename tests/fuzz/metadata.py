"""A backend that runs ATen and gives results the strides of torch's metadata in dimensions of size one.

A compiler knows eager's strides from AOTAutograd's metadata. For some operators the metadata differs from the kernels
in dimensions of size one, where strides have no effect. Differences that appear with this backend are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd


def restrided(made: Any, said: Any) -> Any:
    if not isinstance(made, Tensor) or not isinstance(said, Tensor) or made.dim() != said.dim():
        return made
    wanted = [s if n == 1 and isinstance(s, int) else t for n, s, t in
              zip(made.shape, said.stride(), made.stride(), strict=True)]
    return made if wanted == list(made.stride()) else made.as_strided(made.shape, wanted, made.storage_offset())


def laid(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
    *_, output = gm.graph.nodes
    said = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in output.args[0]]

    def run(args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        with torch.no_grad():
            return [restrided(t, s) for t, s in zip(gm(*given), said, strict=True)]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


by_metadata = aot_autograd(fw_compiler=laid, keep_inference_input_mutations=True)
