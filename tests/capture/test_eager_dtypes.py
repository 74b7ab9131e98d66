"""Run-time numbers that eager's kernels reject: integers have no negative powers, and small dtypes hold few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

CASES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "pow": lambda x, n: x.pow(n) + 1,
    "powers of a list": lambda x, n: torch._foreach_pow([x, x], n),
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n) + 1,
    "clamp": lambda x, n: x.clamp(max=n) + x,
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "add": lambda x, n: x + n,
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        found = call()
        return [t.tolist() for t in (found if isinstance(found, (list, tuple)) else [found])]
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    f, x = CASES[name], torch.tensor([1, 2, 3]).to(dtype)
    compiled = torch.compile(f, backend="flambeau", dynamic=True)
    for n in (3, 5, -1, 300, 2, 1 << 20, -300):
        assert outcome(lambda n=n: compiled(x, n)) == outcome(lambda n=n: f(x, n)), n  # type: ignore[misc]
