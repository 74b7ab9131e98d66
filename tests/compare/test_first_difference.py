"""A deviation that is planted in the generated code is found by `compare`, and named at the right operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from flambeau import debug
from flambeau.config import config
from flambeau.targets.base import get_target

TARGETS = ("cpu", "interpreter")
Edit = Callable[[str, str], str]  # the text of a kernel, and the target

OPERATION = r"^(\s*(?:const float )?)(t\d+) = (\S+|tl\.full\(.*?\)) ([*+]) (\S+?|tl\.full\(.*?\))(;?)$"
# In numpy, Triton's fma rounds twice; in float64 the product is exact.
FMA = {"cpu": "__builtin_fmaf({}, {}, {})",
       "interpreter": "tl.cast({}.to(tl.float64) * {}.to(tl.float64) + {}.to(tl.float64), tl.float32)"}
ROUNDED = {"cpu": (r"(t\d+) = fl::to_half\((t\d+)\);", r"(t\d+) = fl::to_float\((t\d+)\);"),
           "interpreter": (r"(t\d+) = tl\.cast\((t\d+), tl\.float16\)", r"(t\d+) = tl\.cast\((t\d+), tl\.float32\)")}
REVERSED = {"cpu": (r"for \(int64_t g0 = 0; g0 < 3; \+\+g0\)", "for (int64_t g0 = 2; g0 >= 0; --g0)"),
            "interpreter": (r"(t\d+) = (t\d+) \+ (t\d+)\n(.*\n *t\d+) = \1 \+ (t\d+)$",
                            r"\1 = \2 + \3\n\4 = \5 + \3 + \2")}


def operations(text: str) -> dict[str, tuple[str, str, str]]:
    return {m[2]: (m[3], m[4], m[5]) for m in re.finditer(OPERATION, text, re.MULTILINE)}


def one_fma_too_many(text: str, target: str, of: str = "") -> str:
    """A product and the sum that reads it, rounded once. `of`: only products with this number."""
    known = operations(text)

    def edit(m: re.Match[str]) -> str:
        inner = known.get(m[3])
        if m[4] != "+" or inner is None or inner[1] != "*" or of not in inner[2]:
            return m[0]
        return f"{m[1]}{m[2]} = {FMA[target].format(inner[0], inner[2], m[5])}{m[6]}"

    return re.sub(OPERATION, edit, text, flags=re.MULTILINE)


def reassociated(text: str, target: str) -> str:
    """(a + b) + c as a + (b + c)."""
    known = operations(text)

    def edit(m: re.Match[str]) -> str:
        inner = known.get(m[3])
        if m[4] != "+" or inner is None or inner[1] != "+":
            return m[0]
        return f"{m[1]}{m[2]} = {inner[0]} + ({inner[2]} + {m[5]}){m[6]}"

    return re.sub(OPERATION, edit, text, flags=re.MULTILINE)


def one_cast_too_few(text: str, target: str) -> str:
    """What a product comes to is used as it is, and not as it is stored."""
    known = operations(text)
    narrow, wide = ROUNDED[target]
    halves = {m[1]: m[2] for m in re.finditer(narrow, text) if known.get(m[2], ("", "", ""))[1] == "*"}
    return re.sub(wide, lambda m: m[0].replace(m[0].split(" = ")[1].rstrip(";"), halves[m[2]])
                  if m[2] in halves else m[0], text)


def backwards(text: str, target: str) -> str:
    """A sum over three rows begins with the last."""
    return re.sub(*REVERSED[target], text, flags=re.MULTILINE)


@contextmanager
def planted(target: str, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels of the target are edited before they are built; the texts that changed are listed."""
    changed: list[str] = []
    kind = type(get_target(target))
    render = kind.render

    def wrong(self: Any, kernel: Any, name: str) -> Any:
        source = render(self, kernel, name)
        text = edit(source.text, target)
        changed.extend([text] if text != source.text else [])
        return replace(source, text=text)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "render", wrong)
        yield changed


def chain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x.abs()
    y = y * w
    y = y + b
    y = y.relu()
    return y - x


def three(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x - w
    y = y + b
    y = y + w
    y = y.abs()
    return y - x


def rows(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x[:3] - w[:3]
    y = y.sum(0)
    return y.relu() - b


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 40, generator=generator).to(dtype) for _ in range(3)]


CASES: dict[str, tuple[Edit, Callable[..., Any], torch.dtype, str, str, str]] = {
    "one FMA too many": (one_fma_too_many, chain, torch.float32, "eager", "aten.add.Tensor", "y = y + b"),
    "one cast too few": (one_cast_too_few, chain, torch.float16, "eager", "aten.add.Tensor", "y = y + b"),
    "a reassociated sum": (reassociated, three, torch.float32, "eager", "aten.add.Tensor", "y = y + w"),
    "a sum over rows": (backwards, rows, torch.float32, "fast", "aten.sum.dim_IntList", "y = y.sum(0)"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_a_planted_deviation_is_named(case: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, function, dtype, numerics, operator, line = CASES[case]
    clean = debug.compare(function, *inputs(dtype), numerics=numerics, target=target)
    assert clean.equal and clean.first is None, clean
    with planted(target, edit, monkeypatch) as changed:
        report = debug.compare(function, *inputs(dtype), numerics=numerics, target=target)
    assert changed, "nothing was planted"
    assert not report.equal and report.first is not None
    assert (report.first.operator, report.first.code, report.first.direction) == (operator, line, "forward")
    assert report.first.file == __file__
    assert report.target == target


def deep(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Branches, library calls, and one place far inside at which a number appears that is nowhere else."""
    for k in range(8):
        h = (x @ w.t()) * 0.125
        mask = h.abs() > 0.5
        if k == 5:
            h = h * 0.734375
            h = h + b[:, :5]
        x = torch.where(mask, h, h.relu()) @ b * 0.25 + x
    return x


@pytest.mark.parametrize(("target", "whole"), [("cpu", True), ("cpu", False), ("interpreter", True)])
def test_deep_inside_a_graph(target: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(text: str, target: str) -> str:
        return one_fma_too_many(text, target, of="0.734375")

    with planted(target, edit, monkeypatch) as changed, config.override(regions=not whole):
        report = debug.compare(deep, *inputs(), numerics="eager", target=target)
    assert changed and report.first is not None and (report.graphs == 1) == whole
    assert report.first.operator == "aten.add.Tensor" and report.first.code == "h = h + b[:, :5]"


@pytest.mark.parametrize("target", TARGETS)
def test_in_a_backward(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * w, x * b

    x, w, b = inputs()
    with planted(target, one_fma_too_many, monkeypatch) as changed:
        report = debug.compare(two, x.requires_grad_(), w, b, numerics="eager", target=target)
    assert changed and report.first is not None
    assert all(r.equal for r in report.results) and [r.name for r in report.gradients if not r.equal] == [
        "gradient of input 0"]
    assert (report.first.operator, report.first.direction) == ("aten.add.Tensor", "backward")


def test_what_only_fusion_changes_is_said() -> None:
    """In fast mode a product keeps its precision inside a kernel; in memory it would not."""
    report = debug.compare(chain, *inputs(torch.bfloat16), numerics="fast", target="cpu")
    first = report.first
    assert first is not None and (first.operator, first.kind) == ("aten.add.Tensor", "fusion")
    assert first.unrounded == ["aten.mul.Tensor"]
    assert "only inside a fused kernel" in first.why()
    assert {"aten.mul.Tensor", "aten.add.Tensor"} <= set(first.fused)
