"""Arguments of methods and new weights: matching by order or by name, and the errors for wrong ones."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import flambeau
from flambeau.package import container
from flambeau.package.client import Failure, PackageError, Tensor

ONES, TWOS = np.ones(2, np.float32), np.full(2, 2, np.float32)
BATCH = {"x": ONES, "y": TWOS}
TYPE = r"float32 \[2\] contiguous"
OF_X = f"input 'batch.x': expected {TYPE}, got "


class Pair(NamedTuple):
    first: Any
    second: Any


class Nested(nn.Module):
    """A model with arguments of all kinds, and two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.table.weight

    def forward(self, batch: dict[str, torch.Tensor], k: int = 3, mask: torch.Tensor | None = None, *,
                scale: float = 2.0, other: torch.Tensor) -> torch.Tensor:
        return batch["x"] * k - batch["y"] * scale + other

    def scores(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> flambeau.Module:
    # One tensor is passed for all arguments: they still become separate inputs.
    path, x, model = tmp_path_factory.mktemp("arguments") / "nested.flam", torch.ones(2), Nested().eval()
    flambeau.export(model, ({"x": x, "y": x}, 3), path, kwargs={"other": x}, debug=False,
                    methods={"scores": (model.scores, (torch.arange(2),))})
    return flambeau.load(path)


@pytest.mark.parametrize(("args", "kwargs"), [
    ((BATCH, 3), {}), ((BATCH,), {}), ((BATCH, 3, None), {"scale": 2.0}), ((BATCH,), {"k": 3}), ((), {"batch": BATCH}),
    (({"y": TWOS, "x": ONES},), {}),  # the order of a dictionary does not matter
    ((ONES, TWOS), {}), ((), {"batch.x": ONES, "batch.y": TWOS}),
    (({"x": torch.ones(2), "y": TWOS},), {}),
])
def test_arguments_as_the_model_has_them(module: flambeau.Module, args: tuple, kwargs: dict) -> None:
    assert np.array_equal(module(*args, other=ONES, **kwargs), [0, 0])


def changed(**parts: Any) -> tuple[dict[str, Any]]:
    return ({**BATCH, **parts},)


@pytest.mark.parametrize(("args", "kwargs", "message"), [
    ((BATCH, 4), {}, "argument 'k' is 3 in the package, got 4"),
    ((BATCH,), {"scale": 1}, r"argument 'scale' is 2\.0 in the package, got 1"),
    ((BATCH, 3, ONES), {}, r"argument 'mask' is None in the package, got float32 \[2\]"),
    ((BATCH,), {"batch": BATCH}, "method 'forward': input 'batch' is given twice"),
    ((BATCH,), {"foo": 3}, rf"method 'forward' has no input 'foo': its inputs are batch\.x \({TYPE}\), batch\.y"),
    ((BATCH, 3, None, 1), {}, r"method 'forward' takes 3 inputs, got 4: they are batch\.x"),
    (({"x": ONES},), {}, f"method 'forward': input 'batch.y' is missing: expected {TYPE}"),
    (changed(z=ONES), {}, r"method 'forward' has no input 'batch\.z'"),
    (changed(x=3.0), {}, OF_X + r"float 3\.0"),
    (changed(x="text"), {}, OF_X + "str 'text'"),
    (changed(x=[1.0, 2.0]), {}, OF_X + "dict"),
    (changed(x=b"bytes"), {}, OF_X + "bytes"),
    (changed(x=None), {}, OF_X + "NoneType"),
    (changed(x=ONES.astype(object)), {}, OF_X + r"object \[2\]"),
    (changed(x=ONES.astype(">f4")), {}, OF_X + r">f4 \[2\]"),
    (changed(x=ONES.astype("U3")), {}, OF_X + r"<U3 \[2\]"),
    (changed(x=ONES.astype(np.complex64)), {}, OF_X + r"complex64 \[2\]"),
    (changed(x=ONES.view([("re", "f4")])), {}, OF_X + r"\[\('re', '<f4'\)\] \[2\]"),
    (changed(x=np.zeros(2, "V0")), {}, OF_X + r"\|V0 \[2\]"),
    (changed(x=np.zeros(2, [("a", "f4"), ("b", "i1")])["a"]), {}, OF_X + r"float32 \[2\] with strides of \[5\] bytes"),
    (changed(x=np.zeros((1,) * 20, np.float32)), {}, OF_X + r"float32 \[1, 1"),
    (changed(x=ONES[::-1]), {}, OF_X + r"float32 \[2\] with strides \[-1\]"),
    (changed(x=torch.ones(2).to_sparse()), {}, OF_X + r"float32 \[2\] of layout torch\.sparse_coo"),
    (changed(x=torch.ones(2, device="meta")), {}, OF_X + r"float32 \[2\] on meta"),
    (changed(x=torch.ones(2, dtype=torch.complex64)), {}, OF_X + r"complex64 \[2\]"),
    (changed(x=torch._neg_view(torch.ones(2))), {}, OF_X + r"float32 \[2\], a view that is negated"),
])
def test_wrong_arguments_are_refused_by_name(module: flambeau.Module, args: tuple, kwargs: dict, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        module(*args, other=ONES, **kwargs)


def test_arrays_that_are_read_only_or_not_aligned_are_taken(module: flambeau.Module) -> None:
    only_read = np.frombuffer(ONES.tobytes(), np.float32)
    shifted = np.frombuffer(b"\0" + ONES.tobytes(), np.float32, offset=1)
    for x in (only_read, shifted, np.asmatrix(ONES).A1):
        assert np.array_equal(module(x, TWOS, ONES), [0, 0])


def test_one_row_lies_as_it_likes(tmp_path: Path) -> None:
    """Strides of sizes of one mean nothing; NumPy's scalars are arrays without dimensions."""
    flambeau.export(lambda x, s: x * s, (torch.ones(2, 3), torch.tensor(2.0)), tmp_path / "f.flam", debug=False,
                    dynamic_shapes=({0: Dim("n", max=8)}, None))
    with flambeau.load(tmp_path / "f.flam") as module:
        x = np.ones((1, 3), np.float32)[::-1]
        assert x.strides[0] < 0 and np.array_equal(module(x, x.sum()), 3 * x)
        with pytest.raises(PackageError, match=r"input 's': expected float32 \[\] contiguous, got float 3\.0"):
            module(x, 3.0)


def test_named_tuples_and_their_parts(tmp_path: Path) -> None:
    def f(pair: Pair, rest: list[torch.Tensor]) -> torch.Tensor:
        return pair.first * 2 + pair.second - rest[0]

    x = torch.ones(2)
    flambeau.export(f, (Pair(x, x), [x]), tmp_path / "f.flam", debug=False)
    with flambeau.load(tmp_path / "f.flam") as module:
        assert np.array_equal(module(Pair(second=ONES, first=TWOS), [ONES]), [4, 4])


def test_memory_that_is_not_there_is_refused(module: flambeau.Module) -> None:
    """In C, where an array may be described without being there."""
    tensors, out, error = (Tensor * 1)(), (Tensor * 1)(), Failure()
    tensors[0].dtype, tensors[0].rank, tensors[0].sizes[0], tensors[0].strides[0] = 9, 1, 2, 1
    handle = module.retained()
    assert module.library.flam_run(handle, 1, tensors, 1, out, 1, ctypes.byref(error)) == 4
    assert error.message == b"input 'ids': expected int64 [2] contiguous, got no memory"
    module.library.release(handle)


def test_weights_that_are_tied_have_both_names(module: flambeau.Module) -> None:
    ids, ones = np.array([0, 2]), np.ones((3, 2), np.float32)
    assert list(module.weights) == ["table.weight"] and not any("head" in k for k in module.metadata)
    for given in ({"head.weight": ones}, {"table.weight": 2 * ones},
                  {"head.weight": 3 * ones, "table.weight": 3 * ones}):
        module.update_weights(given)
        value = next(iter(given.values()))[0, 0]
        assert np.array_equal(module.scores(ids), np.full((2, 3), 2 * value * value))
    with pytest.raises(PackageError, match=r"weight 'table\.weight' is given two values"):
        module.update_weights({"head.weight": ones, "table.weight": 3 * ones})
    for given, message in (
            ({"head.bias": ones}, r"the package has no weight 'head\.bias'"),
            ({"head.weight": ones.tolist()}, r"weight 'table\.weight': expected float32 \[3, 2\], got list"),
            ({"head.weight": ones.astype(">f4")}, r"expected float32 \[3, 2\], got >f4 \[3, 2\]"),
            ({"head.weight": ones.astype(np.float64)}, r"expected float32 \[3, 2\], got float64 \[3, 2\]"),
            ({"head.weight": ones.T}, r"expected float32 \[3, 2\], got float32 \[2, 3\]")):
        with pytest.raises(PackageError, match=message):
            module.update_weights(given)
    assert np.array_equal(module.scores(ids), np.full((2, 3), 18))


def test_weights_come_in_any_order_of_memory(tmp_path: Path) -> None:
    """A convolution whose channels lie last: all of its sizes are three, so that nothing but the strides tells."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 3, 3).eval().to(memory_format=torch.channels_last), torch.randn(2, 3, 5, 5)
    flambeau.export(model, (x,), tmp_path / "f.flam", debug=False)
    with flambeau.load(tmp_path / "f.flam") as module, torch.no_grad():
        expected = module(x)
        torch.testing.assert_close(expected, model(x))
        section = next(s for s in container.read(tmp_path / "f.flam") if s.kind == container.WEIGHTS)
        (tmp_path / "w.safetensors").write_bytes(section.data)
        weight = model.weight.detach()
        rows = np.ascontiguousarray(weight.numpy())
        for given in ({"weight": rows}, {"weight": weight}, {"weight": np.asfortranarray(rows)},
                      {"weight": rows[::-1].copy()[::-1]}, tmp_path / "w.safetensors"):
            module.update_weights({"weight": np.zeros_like(rows)})
            module.update_weights(given)
            assert torch.equal(module(x), expected)
