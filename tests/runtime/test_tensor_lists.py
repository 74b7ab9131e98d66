"""Lists of tensors that come again: every change is seen, in C++ as in Python, and steps follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import flambeau  # noqa: F401 - the backend
from flambeau.native.build import Background
from flambeau.optim import parameter_groups as groups
from flambeau.runtime import tensor_lists as lists
from flambeau.runtime.tensor_lists import Watch


@pytest.fixture(params=["native", "python"], autouse=True)
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(lists, "native", lambda: None)
    else:
        assert lists.native() is not None, "the extension did not build"


def two_lists() -> list[list[torch.Tensor]]:
    return [[torch.randn(3, 4), Parameter(torch.randn(5)), torch.randn(0)], [torch.randn(()), torch.randn(4, 3).t()]]


CHANGES: dict[str, Callable[[list[list[torch.Tensor]]], Any]] = {
    "size": lambda given: given[0].__setitem__(0, torch.randn(3, 5)),
    "stride": lambda given: given[0].__setitem__(0, torch.randn(4, 3).t()),
    "dtype": lambda given: given[0].__setitem__(0, torch.randn(3, 4).double()),
    "type": lambda given: given[0].__setitem__(1, torch.randn(5)),
    "sparse": lambda given: given[0].__setitem__(0, torch.randn(3, 4).to_sparse()),
    "device": lambda given: given[0].__setitem__(0, torch.empty(3, 4, device="meta")),
    "data": lambda given: setattr(given[0][1], "data", torch.randn(6)),
    "length": lambda given: given[1].pop(),
    "lists": lambda given: given.pop(),
    "neg": lambda given: given[0].__setitem__(0, torch.randn(3, 4)._neg_view()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str) -> None:
    given = two_lists()
    watch = Watch(given)
    assert watch.check(given)
    CHANGES[change](given)
    assert not watch.check(given)


def test_addresses_follow_tensors() -> None:
    given = two_lists()
    watch = Watch(given)
    moves = watch.moves
    assert watch.check(given) and watch.moves == moves
    given[0][0] = torch.randn(3, 4)
    given[0][1].data = torch.randn(5)
    assert watch.check(given) and watch.moves == moves + 1
    assert watch.addresses.tolist() == [t.data_ptr() for tensors in given for t in tensors]
    assert [len(column) for column in watch.by_list] == [3, 2]


def test_memory_that_is_shared_is_seen() -> None:
    x = torch.randn(8)
    assert Watch([[x[:4]], [x[4:]]]).apart()
    assert not Watch([[x[:5]], [x[4:]]]).apart()
    assert Watch([[x], [x[:0]]]).apart()
    assert not Watch([[x[::3]], [x[6:]]]).apart()  # gaps included
    watch = Watch([[torch.randn(4), torch.randn(4)]])
    assert watch.apart()
    assert watch.check([[x[:4], x[3:7]]]) and not watch.apart()
    gone = torch.randn(4)
    gone.untyped_storage().resize_(0)
    assert watch.check([[x[:4], gone]]) and not watch.apart()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers(dtype: torch.dtype) -> None:
    for values in ([1.5, 2.5, 1.5], [3.0, 3.0], [7.0]):
        scalars = [torch.tensor(v, dtype=dtype) for v in values]
        expected = values[:1] if len(set(values)) == 1 else values
        assert lists.numbers(scalars, Watch([scalars]).addresses) == expected


def test_versions_of_changed_tensors() -> None:
    given = [torch.randn(3), Parameter(torch.randn(2))]
    before = [t._version for t in given]
    lists.changed(given)
    assert all(t._version > v for t, v in zip(given, before, strict=True))


# ---- groups ------------------------------------------------------------------------------------------------


def replace_state(optimizer: torch.optim.Optimizer, p: Parameter) -> None:
    for name, value in optimizer.state[p].items():
        optimizer.state[p][name] = value * 2 if value.dim() else value.clone()


def reload(optimizer: torch.optim.Optimizer, _: Parameter) -> None:
    optimizer.load_state_dict({**optimizer.state_dict()})


BETWEEN: dict[str, Callable[[Any, Parameter], Any]] = {
    "nothing": lambda optimizer, p: None,
    "no gradient": lambda optimizer, p: setattr(p, "grad", None),
    "state": replace_state,
    "no state": lambda optimizer, p: optimizer.state.pop(p),
    "loaded": reload,
    "moved": lambda optimizer, p: setattr(p, "data", p.data.clone()),
    "settings": lambda optimizer, p: optimizer.param_groups[0].update(lr=0.3, weight_decay=0.2),
    "fewer": lambda optimizer, p: optimizer.param_groups[0]["params"].pop(),
    "another": lambda optimizer, p: optimizer.param_groups[0]["params"].__setitem__(0, Parameter(torch.ones(7))),
    "group": lambda optimizer, p: optimizer.add_param_group({"params": [Parameter(torch.ones(3))], "lr": 0.5}),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_steps_follow_what_happens_between_them(name: str, between: str) -> None:
    torch._dynamo.reset()

    def optimizer() -> torch.optim.Optimizer:
        torch.manual_seed(0)
        made: torch.optim.Optimizer = getattr(torch.optim, name)([Parameter(torch.randn(5, k)) for k in range(1, 4)])
        return made

    ours, eager = optimizer(), optimizer()
    step = torch.compile(ours.step, backend="flambeau", options={"target": "cpu", "numerics": "eager"})
    for k in range(8):
        for o in (ours, eager):
            torch.manual_seed(k)
            for group in o.param_groups:
                for p in group["params"]:
                    p.grad = torch.randn_like(p)
            if k in (3, 5):
                BETWEEN[between](o, o.param_groups[0]["params"][1])
        step()
        eager.step()
        for a, b in zip(ours.param_groups, eager.param_groups, strict=True):
            torch.testing.assert_close(a["params"], b["params"])
    if lists.native() is not None:
        assert all(g.known for g in groups._REMEMBERED[ours].values())


def test_lists_are_remembered_and_gradients_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if lists.native() is None:
        pytest.skip("nothing is remembered without the extension")
    torch._dynamo.reset()
    p = Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    step = torch.compile(optimizer.step, backend="flambeau")
    found: list[bool] = []
    recall = groups.ListGroup.recall
    monkeypatch.setattr(groups.ListGroup, "recall", lambda *args: found.append(recall(*args)) or found[-1])
    for _ in range(5):
        p.grad = torch.randn(4)
        step()
    assert found[-2:] == [True, True]
    optimizer.param_groups[0]["momentum"] = 0.0  # another number of lists
    step()
    assert not found[-1]
    p.grad = torch.sparse_coo_tensor([[1]], [1.0], (4,))
    before = p.detach().clone()
    step()  # torch's own: not the dense step of before
    assert not found[-1]
    torch.testing.assert_close(p.detach(), before - 0.1 * p.grad.to_dense())


def test_an_optimizer_that_cannot_be_hashed() -> None:
    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None  # type: ignore[assignment]

    torch._dynamo.reset()
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = Equal([p], lr=0.5)
    torch.compile(lambda: torch.optim.SGD.step(optimizer), backend="flambeau")()
    assert torch.equal(p.detach(), torch.full((3,), 0.5))


def test_steps_run_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(lists, "EXTENSION", Background("lists", "a text", lists.open_extension, 2,
                                                       lists.EXTENSION.without, "this is no C++"))
    assert lists.native() is None
    assert "more time in Python" in caplog.text
    given = two_lists()
    assert Watch(given).check(given)
