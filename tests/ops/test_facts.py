"""Facts of operators: where they come from, and that no other room keeps a table of operators."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flambeau
from flambeau.ops.facts import EVERYWHERE, Facts, describe, facts, is_exact, named
from flambeau.torch_compat.dispatch import all_operator_names

aten = torch.ops.aten
SOURCES = Path(flambeau.__file__).parent
ROOMS = ("capture", "compare", "compile", "device", "eager", "optim", "runtime", "pipeline.py")
NAMES = {name.removeprefix("aten::").partition(".")[0] for name in all_operator_names() if name.startswith("aten::")}
# Tables whose words are operators' names by chance, or for another reason.
NO_FACTS = {
    "capture/symbols.py COMPUTED": "atoms of the index algebra, as functions of torch's symbolic numbers",
    "device/sparse.py _PARTS": "the methods that take a tensor of each layout apart, in the order of its parts",
}


@pytest.mark.parametrize(("op", "fact", "value"), [
    (aten.bernoulli.p, "random", True),  # by its tag
    (aten.nonzero.default, "shaped_by_data", True),
    (aten.nonzero.default, "waits", True),  # which follows from that
    (aten.linalg_qr.default, "waits", True),  # by a pattern of names
    (aten.relu.default, "in_place", ("relu_",)),  # by torch's way of naming
    (aten._native_batch_norm_legit_functional.default, "in_place", ("_native_batch_norm_legit",
                                                                   "_native_batch_norm_legit_")),
    (aten.index_put_.default, "on_host", ("indices",)),  # by the schema
    (aten.native_layer_norm_backward.default, "checks", False),
    (aten._index_put_impl_.default, "checks", True),  # said of _index_put_impl
    (aten._unsafe_view.default, "view", True),
    (aten.exp.default, "family", "transcendental"),
    (aten._foreach_exp.default, "exact", facts(aten.exp.default).exact),
    (aten.clone.default, "strides", "preserved"),
    (aten.clone.out, "strides", ""),  # what is written to lies as it lay
])
def test_where_facts_come_from(op: torch._ops.OpOverload, fact: str, value: object) -> None:
    assert getattr(facts(op), fact) == value


def test_an_overload_goes_before_its_name() -> None:
    assert is_exact(aten.clamp.default, "cpu", {torch.float32})
    assert not is_exact(aten.clamp.default, "cpu", {torch.half})
    assert not is_exact(aten.clamp.Tensor, "cpu") and is_exact(aten.clamp.Tensor, "cuda")
    assert facts(aten.scatter.src).exact == EVERYWHERE and not facts(aten.scatter.reduce).exact


def test_functions_by_their_names() -> None:
    assert named("relu").fresh and named("relu_").any_order and not named("relu_").fresh
    assert named("conv2d").contracts and named("batch_norm").writes == ("running_mean", "running_var")
    assert named("no such function") == Facts()


def test_a_fact_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(TypeError, match="no fact.*colour"):
        describe(aten.relu, colour="red")


def tables() -> Iterator[tuple[str, ast.expr]]:
    """What modules outside of ops/ assign: "file name", and the value."""
    for path in (p for p in SOURCES.rglob("*.py") if p.relative_to(SOURCES).parts[0] in ROOMS):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(
                node, ast.AnnAssign) else []
            if targets and node.value is not None:  # type: ignore[union-attr]
                yield f"{path.relative_to(SOURCES)} {ast.unparse(targets[0])}", node.value  # type: ignore[union-attr]


def operators_in(table: ast.expr) -> set[str]:
    """The operators that it names: `aten.mm.default`, or as strings if most of them are such names."""
    attributes = {ast.unparse(n).removeprefix("torch.ops.") for n in ast.walk(table) if isinstance(n, ast.Attribute)}
    words = {n.value for n in ast.walk(table) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    strings = {w for w in words if w.removeprefix("aten::").partition(".")[0] in NAMES}
    return {a for a in attributes if a.startswith("aten.")} | (
        strings if len(strings) > 2 and 2 * len(strings) >= len(words) else set())


def test_no_other_room_has_a_table_of_operators() -> None:
    found = {name: operators for name, table in tables() if (operators := operators_in(table))}
    assert found.keys() == NO_FACTS.keys(), f"say it beside the operators, in ops/: {found}"


def test_the_search_finds_tables() -> None:
    """Such as there were."""
    assert operators_in(ast.parse("(aten.eq.Tensor, torch.ops.aten.ne.Tensor)", mode="eval").body) >= {
        "aten.eq.Tensor", "aten.ne.Tensor"}
    assert operators_in(ast.parse("{'relu': 1, 'histc': 2, 'aten::bincount.out': 3}", mode="eval").body)
    assert not operators_in(ast.parse("('cache_dir', 'log', 'jobs')", mode="eval").body)
