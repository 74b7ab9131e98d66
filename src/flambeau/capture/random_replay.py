"""Random operators that the backward runs again (activation checkpointing): calls with the saved random state.

The partitioner wraps such operators: the forward returns the generator's state along with the result, and the backward
takes it. Forward and backward are compiled separately, and one of them may be left to ATen. So the state is always
torch's own, and the operator is ATen's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from flambeau.torch_compat.fake import detect_fake_mode

RUN_AND_SAVE = torch.ops.higher_order.run_and_save_rng_state
RUN_WITH = torch.ops.higher_order.run_with_rng_state


def results(n: fx.Node) -> Any:
    """Torch's metadata for the wrapped operator's results (a fake tensor, or several), not on the wrapper's node."""
    start = 1 if n.target is RUN_AND_SAVE else 2
    op: Any = n.args[start - 1]
    args: Any
    kwargs: Any
    args, kwargs = (fx.node.map_arg(x, lambda a: a.meta["val"]) for x in (n.args[start:], n.kwargs))
    mode = detect_fake_mode([m.meta["val"] for m in n.graph.nodes if "val" in m.meta])
    assert mode is not None
    with mode:
        return op(*args, **kwargs)
