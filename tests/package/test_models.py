"""Whole models in packages, with dynamic sizes, give the compiler's bits without a compiler."""

from __future__ import annotations

import pytest

from flambeau.bench.harness import Row
from flambeau.bench.models import SUITE
from flambeau.bench.package_bits import FAMILIES, Case, bits, of_family, of_suite


def same(case: Case, target: str) -> None:
    for found in bits(case, target, Row("", "bits", target)).accuracy["package"]:
        assert found["results"] and found["unequal"] == 0 and found["rel"] < 1e-3


@pytest.mark.parametrize("target", ["cpu", "opencl"])
@pytest.mark.parametrize("name", [n if n == "scans" else pytest.param(n, marks=pytest.mark.slow) for n in SUITE])
def test_models_of_the_suite(name: str, target: str) -> None:
    same(of_suite(name, "tiny"), target)


@pytest.mark.parametrize("target", ["cpu", "opencl"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_models_of_families(name: str, target: str) -> None:
    """Normalisation, bags, sampling and pooling, attention, convolution."""
    same(of_family(name), target)
