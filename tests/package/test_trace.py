"""Models traced by torch.export: results of any kind, operators that torch decomposes, exported programs, and operators
that only torch has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import flambeau
from flambeau.errors import UnsupportedError
from flambeau.package import container
from flambeau.package.client import PackageError
from flambeau.package.plan import direct_outputs
from flambeau.runtime.plain_program import from_plain

F = nn.functional
B = Dim("B", max=16)


def exported(model: object, args: tuple, folder: Path, shapes: object = None, **options: object) -> flambeau.Module:
    flambeau.export(model, args, folder / "model.flam", dynamic_shapes=shapes, debug=False, **options)
    return flambeau.load(folder / "model.flam")


def test_results_are_nested_as_the_function_has_them(tmp_path: Path) -> None:
    def several(x: torch.Tensor, k: int) -> tuple:
        return x.t(), x[:, ::2], x.expand(2, *x.shape), [x * k, {"a": x + 1, "n": 3, "none": None}], "text"

    x = torch.randn(3, 4)
    with exported(several, (x, 5), tmp_path, ({0: B}, None)) as module:
        x = torch.randn(2, 4)
        found, expected = module(x), several(x, 5)
        assert found[3][1]["n"] == 3 and found[3][1]["none"] is None and found[4] == "text"
        for a, b in zip((*found[:3], found[3][0], found[3][1]["a"]), (*expected[:3], expected[3][0], x + 1)):
            assert torch.equal(a, b)


def test_keys_of_any_kind_and_numbers_among_results(tmp_path: Path) -> None:
    def named(x: torch.Tensor) -> tuple:
        n, m = x.shape
        return {"output": x + 1, "value": None, "dict": {0: x * n, 1.5: n}}, {"output": x}, n * m, m / n, []

    with exported(named, (torch.randn(3, 4),), tmp_path, ({0: B, 1: Dim("M", max=9)},)) as module:
        for x in (torch.randn(3, 4), torch.randn(5, 2), torch.randn(5, 0)):
            found, expected = module(x), named(x)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            assert list(map(type, found)) == list(map(type, expected)) and type(found[0]["dict"][1.5]) is int


def test_results_lie_as_in_eager_at_any_size(tmp_path: Path) -> None:
    def turned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * x.shape[1] ** -0.5).permute(2, 0, 1) + 1, x.transpose(0, 1).relu(), x / x.shape[0] ** 0.5

    with exported(turned, (torch.randn(3, 4, 5),), tmp_path, ({0: B, 1: Dim("M", min=2, max=9)},)) as module:
        for x in (torch.randn(3, 4, 5), torch.randn(5, 2, 5)):
            for a, b in zip(module(x), turned(x), strict=True):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride()


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_views_of_whole_results_are_not_copied(target: str, tmp_path: Path) -> None:
    """A view with all elements of a kernel's result, such as that of a linear layer for three dimensions."""
    def views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x.flatten(0, 1) @ w).relu()
        return y.view(*x.shape[:2], -1), (x + 1).flatten(1).t(), (x * 2).flatten(1)[:, 1:]

    path = tmp_path / "views.flam"
    x, w = torch.randn(3, 4, 5), torch.randn(5, 6)
    shapes = ({0: B, 1: Dim("M", min=2, max=9)}, None)
    flambeau.export(views, (x, w), path, dynamic_shapes=shapes, targets=[target])
    program = from_plain(next(bytes(s.data) for s in container.read(path) if s.kind == container.PROGRAM))
    assert {0, 1} <= direct_outputs(program).keys()
    if target == "cpu":
        with flambeau.load(path) as module:
            for y in (x, torch.randn(2, 7, 5)):
                results, expected = module(y, w), views(y, w)
                torch.testing.assert_close(results, expected)
                assert [z.stride() for z in results[:2]] == [z.stride() for z in expected[:2]]


def test_inputs_that_are_written_to_are_refused_by_name(tmp_path: Path) -> None:
    def step(x: torch.Tensor, k: int, total: torch.Tensor) -> torch.Tensor:
        return total.add_(x * k)

    with pytest.raises(UnsupportedError, match="forward: it writes to its input 'total'"):
        exported(step, (torch.ones(2), 3, torch.zeros(2)), tmp_path)


@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_operators_that_torch_takes_apart(numerics: str, tmp_path: Path) -> None:
    """Also in exact numerics, where nothing else is taken apart."""
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)

        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
            up = F.interpolate(image, scale_factor=2.0, mode="bilinear", align_corners=False)
            wide = F.interpolate(image, size=(7, 9), mode="bicubic")
            return self.norm(self.conv(up)).mean((2, 3)), wide, F.pixel_shuffle(up.tile(1, 4, 1, 1), 2).kthvalue(2)[0]

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(3, 3, 5, 6)
    if numerics == "eager":  # packages do not contain eager's kernels of convolution and normalisation
        with pytest.raises(UnsupportedError, match=r"aten\.convolution\.default.*native_group_norm"):
            exported(model, (x,), tmp_path, numerics=numerics)
        model.forward = lambda image: (
            F.interpolate(image, scale_factor=2.0), F.relu6(image).square().argmax(-1),
            F.pad(image, (1, 1, 0, 0), "circular").reshape(-1, 8).t())
    with exported(model, (x,), tmp_path, numerics=numerics) as module, torch.no_grad():
        for a, b in zip(module(x), model(x), strict=True):
            torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if numerics == "eager" else {}))


def test_grouped_heads_and_masks(tmp_path: Path) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def args(n: int, t: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(n, 4, t, 8), *torch.randn(2, n, 2, t, 8), torch.rand(n, 1, t, t) > 0.2)

    t = Dim("T", min=2, max=64)
    with exported(attend, args(2, 5), tmp_path, (*({0: B, 2: t},) * 3, {0: B, 2: t, 3: t})) as module:
        for given in (args(2, 5), args(3, 9)):
            torch.testing.assert_close(module(*given), attend(*given))


def test_an_exported_program_is_a_model(tmp_path: Path) -> None:
    """torch.export fails for this module without strict=True, because a list holds its cache."""
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(8, 4))
            self.held = [self.cache]

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.held[0].index_copy_(0, at, x)
            return self.cache.cumsum(0)

    args = torch.randn(2, 4), torch.tensor([1, 5])
    program = torch.export.export(Step(), args, strict=True)
    with exported(program, (), tmp_path) as module:
        assert [p.name for p in module.load_method("forward").entry.inputs] == ["x", "at"]
        expected = torch.zeros(8, 4)
        for k in range(3):
            x, at = torch.randn(2, 4), torch.tensor([k, 7 - k])
            expected[at] = x
            torch.testing.assert_close(module(x, at), expected.cumsum(0))


def test_bits_of_bfloat16_are_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy has no such dtype; what a package returns may be given to it."""
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)  # a library with that dtype
    linear = nn.Linear(8, 8).bfloat16()
    with exported(linear, (torch.ones(2, 8, dtype=torch.bfloat16),), tmp_path) as module:
        x = torch.randn(2, 8).bfloat16()
        bits = module(x.view(torch.int16).numpy().view(np.uint16))
        assert bits.dtype == np.uint16 and np.array_equal(bits.view(np.int16), module(x).view(torch.int16).numpy())
        assert module(bits).dtype == np.uint16
        module.update_weights({"bias": np.zeros(8, np.uint16)})
        with pytest.raises(PackageError, match=r"input 'input': expected bfloat16 \[2, 8\] contiguous, got int16"):
            module(bits.view(np.int16))


class Factored(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, r = torch.linalg.qr(x.relu() + 2 * torch.eye(x.shape[-1]))
        return (q @ r).sum(-1), torch.linalg.inv(x)


def keeps_checks() -> bool:
    """Whether torch exports an operator without results: torch 2.11 drops it."""
    program = torch.export.export(Factored(), (torch.eye(3),)).run_decompositions()
    return "_linalg_check_errors" in str(program.graph)


def test_operators_without_a_kernel_are_refused_by_name(tmp_path: Path) -> None:
    checks = r"aten\._linalg_check_errors.*" if keeps_checks() else ""
    with pytest.raises(UnsupportedError,
                       match=checks + r"aten\.linalg_qr\.default \(in forward, cpu"):
        exported(Factored(), (torch.eye(3),), tmp_path)
    with pytest.raises(UnsupportedError, match=r"aten\.linalg_qr.*\(in forward, opencl:cpu\)"):
        exported(Factored(), (torch.eye(3),), tmp_path, torch_operators=True, targets=["opencl:cpu"])
    with pytest.raises(UnsupportedError, match=r"aten\.index\.Tensor"):  # the number of results depends on data
        exported(lambda x: x[x > 0], (torch.eye(3),), tmp_path, torch_operators=True)
    with pytest.raises(UnsupportedError, match=r": \.item\(\) \(in forward, cpu\)"):
        exported(lambda x: x * x.argmax().item(), (torch.rand(4),), tmp_path, torch_operators=True)
    assert not (tmp_path / "model.flam").exists()


def test_operators_are_left_to_torch_where_asked(tmp_path: Path) -> None:
    with exported(Factored(), (torch.randn(3, 4, 4),), tmp_path, {"x": {0: B}}, torch_operators=True) as module:
        assert "aten.linalg_qr.default" in module.metadata["torch"]
        for n in (3, 5):
            x = torch.randn(n, 4, 4)
            for a, b, c in zip(module(x), module(x.numpy()), Factored()(x), strict=True):
                torch.testing.assert_close(a, c, rtol=1e-3, atol=1e-3)
                assert np.array_equal(a.numpy(), b)
        if checks := keeps_checks():
            with pytest.raises(PackageError, match=r"aten\._linalg_check_errors.*singular"):
                module(torch.zeros(1, 4, 4))
    text = f"import sys; sys.modules['torch'] = None; import flambeau; flambeau.load({str(tmp_path / 'model.flam')!r})"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    first = "aten._linalg_check_errors.default, " if checks else ""
    assert f"of its targets, cpu needs torch for {first}aten.linalg_inv_ex" in done.stderr
