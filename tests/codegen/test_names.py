"""Kernels are named after their operators, in every language."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F

from flambeau import pipeline
from flambeau.codegen.source import BlockSource, Part, Range, RangeSource, called
from flambeau.pipeline import Compiled


def titles(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[str]:
    seen: list[Compiled] = []
    pipeline.OBSERVERS.append(seen.append)
    try:
        torch.compile(function, backend="flambeau")(*args)
    finally:
        pipeline.OBSERVERS.remove(seen.append)
    return [text.title for c in seen for text in c.texts]


def test_what_a_kernel_computes() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.layer_norm(x, (64,)))

    first, = titles(step, torch.randn(8, 64))
    assert re.fullmatch(r"flambeau_layer_norm_gelu_[0-9a-f]{8}", first)


def test_equal_kernels_stay_one() -> None:
    """Whatever else is in their graphs, and however often operators come."""
    def one(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.cumsum(0), x.exp() + 1

    x = torch.randn(33, 7)
    assert {*titles(one, x)} < {*titles(two, x)}


def test_names_are_bounded() -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin().cos().tanh().sigmoid().erf().sqrt().log1p().relu().neg().floor().ceil()

    name, = titles(many, torch.randn(50))
    assert len(name) <= 60


def test_every_language_has_them() -> None:
    text = "def part0(p0):\n    fl.sum(p0)\n\ndef part1(p0):\n    pass\n"
    kernel = cast(Any, SimpleNamespace(origins=("native_layer_norm_3", "gelu")))
    blocks = called(kernel, BlockSource("k0", text, ("*fp32",), (), (Part("part0", "1"), Part("part1", "2"))))
    assert isinstance(blocks, BlockSource)
    assert re.findall(r"def (\w+)", blocks.text) == [blocks.title, f"{blocks.title}_1"] == [
        p.function for p in blocks.parts]
    ranges = called(kernel, RangeSource("k0", "void KERNEL_NAME_0() {}", (), (), (), 0, (Range("KERNEL_NAME_0", "1"),)))
    assert isinstance(ranges, RangeSource)
    assert f"{ranges.title}_0()" in ranges.text and ranges.ranges[0].function == f"{ranges.title}_0"
    assert ranges.title.startswith("flambeau_layer_norm_gelu_")
