"""The checker of results on a GPU finds wrong values, and tolerates those that eager has too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flambeau.bench.cliff_cases import draw
from gpu_results import INDEXED, PLAIN, bits, chosen, faults, judged, part


class Talk:
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def tell(self, rows: dict[int, dict[str, Any]]) -> None:
        self.rows |= rows

    def attempt(self, what: str, act: Any) -> None:
        act()


def test_wrong_values_are_found_where_eager_has_none() -> None:
    true = torch.randn(50, 60, dtype=torch.float64)
    eager = true.float()
    ours = eager.clone()
    assert not judged([ours], [eager], [true])
    ours[3, 4:9] += 1
    assert "5 wrong values, eager's 0: at [[3, 4]" in judged([ours], [eager], [true])
    eager[7, :4] -= 1
    assert not judged([ours], [eager], [true])
    assert "int32[2]" in judged([torch.ones(2, dtype=torch.int32)], [torch.ones(2)], [true])
    assert "1 wrong" in judged([torch.tensor([1, 2, 3])], [torch.tensor([1, 2, 4])], [torch.tensor([1, 2, 4])])


def test_bits_tell_where_values_are() -> None:
    for x in (torch.randn(40), torch.randn(40).bfloat16(), torch.arange(40), torch.arange(40) > 7):
        y = x.clone()
        assert bits(x) == bits(y)
        y[[3, 30]] = x[[30, 3]]
        assert bits(x) != bits(y)
    assert bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))


def test_half_of_the_cases_have_much_index_arithmetic() -> None:
    seeds = list(chosen(5, 60, "cuda"))
    assert len(set(seeds)) == 60
    indexed = sum(draw(seed, "cuda").family in INDEXED for seed in seeds)
    assert 25 <= indexed <= 50


def test_cases_run_and_faults_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAIN, "0")  # restored afterwards
    seeds = list(chosen(11, 3, "tiny"))
    talk, plain = Talk(), Talk()
    part(talk, seeds, "tiny", "cpu", False)
    part(plain, seeds, "tiny", "cpu", True)
    rows = {seed: {"name": "x", **plain.rows[seed], **talk.rows[seed]} for seed in seeds}
    assert len(rows) == 3 and not faults(rows)
    rows[seeds[1]]["plain"] = [1]
    rows[seeds[2]]["wrong"] = "nothing is right"
    assert faults(rows) == [f"{seeds[1]} x: other bits without optimization", f"{seeds[2]} x: nothing is right"]
    rows[seeds[1]]["repeats"] = False
    assert len(faults(rows)) == 1
