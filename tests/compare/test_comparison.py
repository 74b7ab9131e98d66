"""`flambeau.debug.compare`: three runs of one call without side effects, and the report on them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flambeau
from flambeau import debug
from flambeau.capture.decompositions import table
from flambeau.compare.copied_call import Twin

aten = torch.ops.aten


def plain(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 3 - 1).relu()


def test_equal() -> None:
    report = debug.compare(plain, torch.randn(4, 5, requires_grad=True), numerics="eager")
    assert report.equal and report.first is None and not report.notes
    assert [row.name for row in report.rows] == ["result", "gradient of input 0"]
    assert (report.graphs, report.target, report.total, report.differ) == (2, "cpu", 40, 0)
    assert "bit for bit" in str(report)
    assert all(row.ratio == 1.0 for row in report.rows) and not report.worse()


@pytest.mark.parametrize("function", [plain, nn.ReLU()])
def test_what_is_compiled_already_is_compared_with_eager(function: Callable[..., torch.Tensor]) -> None:
    def refuse(graph: object, inputs: object) -> None:
        raise AssertionError("eager is compiled")

    assert debug.compare(torch.compile(function, backend=refuse), torch.randn(4), numerics="eager").equal


def test_nothing_is_disturbed() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[0].weight.grad = torch.ones(8, 6)
    x = torch.randn(5, 6, requires_grad=True)
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    before, inputs, state = torch.get_rng_state(), x.detach().clone(), torch.get_default_dtype()
    report = debug.compare(model, x)
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items())
    assert torch.equal(x.detach(), inputs) and x.grad is None and torch.equal(model[0].weight.grad, torch.ones(8, 6))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() is state
    assert "1.running_mean afterwards" in [row.name for row in report.changed]
    assert any("random numbers" in note for note in report.notes)  # other ones in float64, so no error against it
    assert all(row.rms_eager is None for row in report.rows)


def test_random_numbers_are_the_same_in_each_run() -> None:
    """Drawn outside of any graph they are eager's."""
    def noisy(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        noise = outside(x)
        return x * noise + 1

    @torch._dynamo.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x)

    assert debug.compare(noisy, torch.randn(30), numerics="eager").equal


def test_several_graphs_and_kinds_of_results() -> None:
    def mixed(x: torch.Tensor) -> dict[str, object]:
        y = x * 3
        torch._dynamo.graph_break()
        return {"index": y.argmax(1), "sign": y > 0, "sum": [y - x, "text"], "none": None, "nan": (y / 0) * 0}

    report = debug.compare(mixed, torch.randn(3, 4))
    assert report.equal and report.graphs == 2
    assert [row.name.removeprefix("result") for row in report.results] == [
        "['index']", "['sign']", "['sum'][0]", "['sum'][1]", "['none']", "['nan']"]
    assert not report.gradients


def test_empty_tensors_and_nothing_at_all() -> None:
    assert debug.compare(lambda x: x.exp().sum(0), torch.randn(0, 3, requires_grad=True)).equal
    report = debug.compare(lambda x: 7, torch.randn(2))
    assert report.equal and report.graphs == 0 and "nothing was compiled" in report.notes[0]


def test_inputs_that_are_changed_in_place() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x.mul_(2).sub_(y)

    x = torch.randn(3)
    kept = x.clone()
    report = debug.compare(step, x, torch.randn(3), numerics="eager")
    assert torch.equal(x, kept) and [row.name for row in report.changed] == ["input 0 afterwards"] and report.equal


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).relu() + self.norm(x)


def test_layers_and_the_module_of_the_first_operator() -> None:
    torch.manual_seed(2)
    report = debug.compare(Layers(), torch.randn(64, 32))
    assert [row.name for row in report.layers] == ["norm", "up", "norm (call 2)"]
    assert report.layers[0].differ and report.layers[0].ratio is not None  # ours sums in another order
    assert report.first is not None and report.first.operator == "aten.native_layer_norm.default[0]"
    assert (report.first.layer, report.first.code) == ("norm", "return self.up(self.norm(x)).relu() + self.norm(x)")
    assert not debug.compare(Layers(), torch.randn(4, 32), layers=False, locate=False).layers


def test_a_difference_of_the_capture_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is compiled faithfully, but holds other operators than eager calls."""
    def other(x: torch.Tensor) -> torch.Tensor:
        return aten.mul.Tensor(aten.mul.Tensor(x, -3.0), 1 / 3)

    monkeypatch.setitem(table(False), aten.neg.default, other)
    report = debug.compare(lambda x: -(x + 1), torch.randn(100))
    assert report.first is not None and (report.first.operator, report.first.kind) == ("aten.neg.default", "capture")
    assert report.first.file == __file__ and "captured" in report.first.why()


def test_private_results_of_an_operator_are_passed_over() -> None:
    """On the CPU eager keeps no list of bags for this call, though its metadata say so; ours is there."""
    torch.manual_seed(4)
    weight, index = torch.randn(50, 8, dtype=torch.bfloat16, requires_grad=True), torch.randint(50, (40,))
    report = debug.compare(lambda w: F.embedding_bag(index, w, torch.tensor([0, 20, 20]), mode="sum").sin(), weight)
    assert report.first is not None and report.first.operator in ("aten._embedding_bag.default[0]", "aten.sin.default")


def test_unknown_options() -> None:
    with pytest.raises(flambeau.OptionError, match="numerics"):
        debug.compare(plain, torch.randn(2), numerics="exact")
    with pytest.raises(flambeau.OptionError, match="no-such"):
        debug.compare(plain, torch.randn(2), target="no-such")


def test_an_error_of_the_function_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        debug.compare(lambda x: x + torch.ones(3), torch.ones(2))


# ---- the float64 reference ---------------------------------------------------------------------------------


def test_the_reference_is_wide_throughout() -> None:
    def casts(x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(0, 1, 50, dtype=torch.float32)
        return (x.to(torch.bfloat16).float() + torch.full((50,), 0.1)).exp().half() + table

    x = torch.randn(50)
    twin = Twin(casts, (x,), wide=True).call()
    wanted = (x.double() + 0.1).exp() + torch.linspace(0, 1, 50, dtype=torch.float64)
    assert twin.dtype is torch.float64 and torch.equal(twin, wanted)


def test_what_has_no_reference_says_so() -> None:
    report = debug.compare(lambda x: x.view(torch.int32) + 1, torch.randn(3))
    assert report.equal and "bits of a number" in report.notes[0]
    frozen = torch.zeros(3)

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy((x + 1).numpy().astype("float32")) + frozen.float().numpy().sum().item()

    report = debug.compare(narrow, torch.randn(3))
    assert report.results[0].rms_eager is None and "float32" in report.notes[-1]


# ---- copies of what a function holds -----------------------------------------------------------------------


def test_what_a_function_holds_is_copied() -> None:
    linear, scale, both = nn.Linear(3, 3), torch.ones(3, requires_grad=True), [torch.zeros(3)]

    def inner(x: torch.Tensor) -> torch.Tensor:
        return linear(x) * scale

    def outer(x: torch.Tensor, shift: list[torch.Tensor] = both) -> torch.Tensor:
        return inner(x) + shift[0]

    for function in (outer, functools.partial(outer), Holding(outer).call):
        twin = Twin(function, (torch.ones(3),))
        held = {id(t) for t in twin.held().values()}
        assert len(twin.leaves) == 3 and not held & {id(t) for t in (*linear.parameters(), scale, *both)}
        assert torch.equal(twin.call(), function(torch.ones(3)))
        twin.call().sum().backward()
        assert scale.grad is None and linear.weight.grad is None
        assert all(t.grad is not None for t in twin.leaves.values())


class Holding:
    def __init__(self, function: object) -> None:
        self.function = function

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[operator]


def test_shared_tensors_stay_shared_and_keep_their_strides() -> None:
    weight = torch.randn(4, 3).t().requires_grad_()
    twin = Twin(lambda x, y: x @ weight, (weight, weight))
    assert twin.args[0] is twin.args[1] and twin.args[0].stride() == (1, 3) and len(twin.leaves) == 1
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert list(Twin(tied, ()).leaves) == ["0.weight", "0.bias", "1.bias"]
