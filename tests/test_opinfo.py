"""Every entry of PyTorch's operator database, forward and gradient, and through torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch.utils import _pytree as pytree

from flambeau.testing.opinfo import OPS, RANDOM, check_opinfo, is_undefined, tolerance
from samples import agrees

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)

# Entries for which eager itself is wrong, so that it cannot be the reference. The special functions are tested against
# scipy (tests/codegen/test_special.py).
EAGER_IS_OFF = {
    ("special_bessel_j0", torch.float64): "eager is off by 7e-7 in double",
    ("special_bessel_j1", torch.float64): "eager is off by 1e-7 in double",
    ("special_bessel_y0", torch.float64): "eager is off by 1e-7 in double",
    ("special_bessel_y1", torch.float64): "eager is off by 1e-7 in double",
}


def taken(dtypes: Iterable[torch.dtype]) -> Iterator[tuple[str, torch.dtype]]:
    """All entries, in the dtypes that eager supports and computes correctly."""
    return ((name, dtype) for name, op in OPS.items() for dtype in dtypes
            if dtype in op.supported_dtypes("cpu") and (name, dtype) not in EAGER_IS_OFF)


def cases() -> list:
    return [pytest.param(name, dtype, marks=[pytest.mark.slow if dtype is torch.float32 else pytest.mark.sweep],
                         id=f"{name}-{str(dtype)[6:]}") for name, dtype in taken(DTYPES)]


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_samples_agree_with_eager(name: str, dtype: torch.dtype) -> None:
    report = check_opinfo(name, dtype, limit=8 if dtype is torch.float32 else 4)
    agrees(report)


def run(op, sample, backend: str | None):
    """The outputs of one sample, in eager (None) or compiled."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    flat = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in flat]

    def call(flat):
        first, args, kwargs = pytree.tree_unflatten(flat, spec)
        return op(first, *args, **kwargs)

    torch.manual_seed(0)
    return call(flat) if backend is None else torch.compile(call, backend=backend)(flat)


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(OPS))
def test_compiles_what_aot_eager_compiles(name: str) -> None:
    op = OPS[name]
    dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
    if dtype is None:
        pytest.skip("the entry has none of the judged dtypes on the CPU")
    run_any = False
    for sample in list(op.sample_inputs("cpu", dtype))[:2]:
        torch._dynamo.reset()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = run(op, sample, "aot_eager")
        except Exception:
            continue  # torch's own aot_eager fails on this sample
        torch._dynamo.reset()
        got = run(op, sample, "flambeau")
        for k, (a, b) in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True)):
            if not isinstance(b, torch.Tensor):
                assert a == b
                continue
            assert a.shape == b.shape and a.dtype == b.dtype
            if not any(r in op.name for r in RANDOM) and not is_undefined(op, dtype, 0, k):
                torch.testing.assert_close(a, b, equal_nan=True, **tolerance(op, b.dtype))
        run_any = True
    if not run_any:
        pytest.skip("aot_eager compiles none of the samples")
