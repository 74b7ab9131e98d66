"""What test_device.py runs in a process of its own: which tensors are one, whose memory they have, what is in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flambeau

DEV = "flambeau"


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    flambeau.enable_device()


# ---- parameters that move --------------------------------------------------------------------------------


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
    model(torch.randn(5, 3)).sum().backward()
    return model


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda m: m.to(DEV), "there and back": lambda m: m.to(DEV).cpu(), "half": lambda m: m.to(DEV).half(),
    "both": lambda m: m.to(DEV, torch.bfloat16), "method": lambda m: m.flambeau(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_parameters_stay_what_they_are(move: Callable[[nn.Module], nn.Module]) -> None:
    model = model_of()
    before = {name: (p, p.grad, p._version, p.detach().clone()) for name, p in model.named_parameters()}
    as_cpu = model_of().double()
    move(model)
    for (name, p), twin in zip(model.named_parameters(), as_cpu.parameters()):
        same, grad, version, values = before[name]
        assert p is same and p.grad is grad and p.is_leaf and p.requires_grad and p._version - version == 0
        assert grad is not None and grad.device == p.device and grad.dtype == p.dtype
        assert twin._version == version and not p._is_view()
        torch.testing.assert_close(p.detach().cpu().float(), values, rtol=1e-2, atol=1e-2)
    assert {t.device.type for t in model.buffers()} == {next(model.parameters()).device.type}


def test_data_is_given_away() -> None:
    p = nn.Parameter(torch.arange(6.0))
    view = p.detach()[2:]
    p.data = p.data.to(DEV)
    assert p.device.type == DEV and view.device.type == "cpu" and view.tolist() == [2, 3, 4, 5]
    (p * 3).sum().backward()
    assert p.grad is not None and p.grad.device.type == DEV and p.grad.tolist() == [3] * 6
    p.data = p.data.cpu()
    assert p.device.type == "cpu" and p.tolist() == list(range(6))
    sparse, dense = torch.eye(3).to_sparse(), torch.eye(3, device=DEV)
    for a, b in ((sparse, dense), (dense, sparse), (sparse.to(DEV), dense), (dense, sparse.to(DEV)),
                 (dense, torch.eye(3, device="meta")), (torch.eye(3, device="meta"), dense)):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            a.data = b


def test_an_optimizer_of_before() -> None:
    x, losses = torch.randn(8, 3), []
    for device in ("cpu", DEV):
        model = model_of()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.to(device)
        for _ in range(3):
            optimiser.zero_grad()
            loss = model(x.to(device)).square().mean()
            loss.backward()
            optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-5


def test_the_flags_of_the_future() -> None:
    for flag in ("overwrite", "swap"):
        change = getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")
        model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
        p, q = model.weight, twin.weight
        change(True)
        try:
            model.to(DEV), twin.to(torch.float64)
        finally:
            change(False)
        assert (model.weight is p) == (twin.weight is q) and model.weight.device.type == DEV


class Tied(nn.Module):
    """A language model whose last layer has the embedding's weight. (device_models.py has one with attention.)"""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(x + nn.functional.gelu(self.mix(self.norm(x))))


def test_tied_weights_train_to_the_losses_of_the_cpu() -> None:
    torch.manual_seed(1)
    model, words = Tied(), torch.randint(50, (4, 12))
    losses: list[list[float]] = []
    for device, mine in (("cpu", copy.deepcopy(model)), (DEV, model)):
        optimiser = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        mine.to(device)
        assert mine.head.weight is mine.embed.weight and len(list(mine.parameters())) == len(optimiser.param_groups[0][
            "params"])
        here = words.to(device)
        losses.append([])
        for _ in range(10):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(mine(here[:, :-1]).flatten(0, 1), here[:, 1:].flatten())
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.3


# ---- arguments that are one tensor -----------------------------------------------------------------------


def partitions(count: int) -> Iterator[tuple[int, ...]]:
    """For each argument the first that it is one with, in all ways."""
    for which in product(*(range(k + 1) for k in range(count))):
        if all(which[w] == w for w in which):
            yield which


# Operators over tensors of one kind: how many, and the call. What they write to comes first.
CALLS: dict[str, tuple[int, Callable[..., Any]]] = {
    "addcmul_": (3, lambda x, a, b: x.addcmul_(a, b, value=0.5)),
    "addcdiv_": (3, lambda x, a, b: x.addcdiv_(a, b)),
    "lerp_": (3, lambda x, a, b: x.lerp_(a, b)),
    "addcmul": (4, lambda out, x, a, b: torch.addcmul(x, a, b, out=out)),
    "where": (3, lambda out, a, b: torch.where(a > 1, a, b, out=out)),
    "foreach addcmul_": (3, lambda x, a, b: torch._foreach_addcmul_([x], [a], [b])),
    "foreach addcdiv_": (3, lambda x, a, b: torch._foreach_addcdiv_([x], [a], [b], 2.0)),
    "foreach lerp_": (3, lambda x, a, b: torch._foreach_lerp_([x], [a], [b])),
    "foreach maximum_": (2, lambda x, a: torch._foreach_maximum_([x], [a])),
    "aminmax": (3, lambda lo, hi, x: torch.aminmax(x, dim=0, keepdim=True, out=(lo[:1], hi[1:2]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_which_arguments_are_one(name: str) -> None:
    """All calls are alike but for that; each comes twice, so that the first does not decide for the others."""
    count, call = CALLS[name]
    torch.manual_seed(2)
    values = torch.rand(count, 3, 5) + 0.5
    for which in [*partitions(count), *reversed([*partitions(count)])]:
        results: list[Any] = []
        for device in ("cpu", DEV):
            given = [v.to(device, copy=True) for v in values]
            try:
                call(*(given[w] for w in which))
            except RuntimeError as error:
                results.append(type(error))
            else:
                results.append(torch.stack(given).cpu())
        if isinstance(results[0], type):
            assert results[0] is results[1], which
        else:
            torch.testing.assert_close(results[1], results[0], msg=f"{which}")


VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "shifted": lambda m: (m[1:7], m[:6], m[2:8]), "interleaved": lambda m: (m[:12:2], m[1:13:2], m[:12:2]),
    "whole and part": lambda m: (m[:6], m[:6], m[3:9]), "apart": lambda m: (m[:6], m[6:12], m[6:12]),
    "expanded": lambda m: (m[:6], m[:1].expand(6), m[6:12]), "reversed": lambda m: (m[:6], m[5:11], m[12:18]),
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_arguments_that_overlap(views: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    for _ in range(2):
        results: list[Any] = []
        for device in ("cpu", DEV):
            memory = torch.arange(1.0, 19.0).to(device)
            x, a, b = views(memory)
            try:
                x.addcmul_(a, b)
            except RuntimeError as error:
                results.append(str(error))
            else:
                results.append(memory.tolist())
        assert results[0] == results[1]


def test_storages_that_share_memory() -> None:
    x = torch.arange(8.0, device=DEV)
    part = torch.empty(0, device=DEV).set_(x.untyped_storage()[8:24])  # a storage of its own
    assert part.tolist() == [2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        x[1:5].add_(part)
    assert x[2:6].add_(part).tolist() == [4, 6, 8, 10] and part.tolist() == [4, 6, 8, 10]


def test_optimizers_one_after_the_other() -> None:
    values = torch.randn(2, 7)
    for kind in (torch.optim.Adagrad, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Rprop):
        results = []
        for device in ("cpu", DEV):
            torch.manual_seed(3)
            params = [nn.Parameter(v.to(device, copy=True)) for v in values]
            optimiser = kind(params, lr=0.01, foreach=True)
            for _ in range(7):
                for p in params:
                    p.grad = torch.randn(7).to(device)
                optimiser.step()
            results.append(torch.stack([p.detach().cpu() for p in params]))
        torch.testing.assert_close(results[1], results[0], msg=kind.__name__)


# ---- what nobody has written -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_uninitialised_memory_of_deterministic_algorithms(dtype: torch.dtype) -> None:
    def unwritten(device: str) -> list[Tensor]:
        some = torch.zeros(4, dtype=dtype, device=device)
        return [torch.empty(4, dtype=dtype, device=device), torch.empty_like(some), some.new_empty(4),
                torch.empty_strided((3, 2), (1, 4), dtype=dtype, device=device), some.clone().resize_(2, 4),
                torch.empty(0, dtype=dtype, device=device).resize_(4), some.clone().resize_(2), some + some]

    torch.use_deterministic_algorithms(True)
    try:
        for ours, theirs in zip(unwritten(DEV), unwritten("cpu")):
            assert ours.stride() == theirs.stride() and ours._version == theirs._version
            torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True, rtol=0, atol=0)
        torch.utils.deterministic.fill_uninitialized_memory = False
        before = torch.full((1000,), 5, device=DEV)
        del before
        assert torch.empty(1000, dtype=torch.int64, device=DEV).tolist() == [5] * 1000  # nobody touched it
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("use", [lambda x: x.select_scatter(x[0], 0, 1), lambda x: x.slice_scatter(x[:1], 0, 1, 2),
                                 lambda x: x.diagonal_scatter(x[:2].diagonal())], ids=["select", "slice", "diagonal"])
def test_copies_with_another_part(use: Callable[[Tensor], Tensor]) -> None:
    """They lie in copies of all the memory, as eager's do."""
    for layout in (lambda b: b.narrow(1, 1, 2), lambda b: b[1:].t()):
        ours, theirs = (use(layout(torch.arange(12.0, device=d).view(3, 4))) for d in (DEV, "cpu"))
        assert (ours.stride(), ours.storage_offset()) == (theirs.stride(), theirs.storage_offset())
        assert torch.equal(ours.cpu(), theirs)


# ---- sparse tensors --------------------------------------------------------------------------------------


def test_views_of_sparse_tensors() -> None:
    pairs = torch.tensor([[[1.0, 2], [0, 0]], [[0, 0], [3, 4]]]).to_sparse(2)
    for device in ("cpu", DEV):
        x = pairs.to(device, copy=True)
        z = torch.view_as_complex(x)
        assert z._values().data_ptr() == x._values().data_ptr() and z.dtype == torch.complex64
        back = torch.view_as_real(z)
        assert back._values().data_ptr() == x._values().data_ptr()
        x._values().mul_(2)
        assert z.to_dense().tolist() == [[2 + 4j, 0], [0, 6 + 8j]] and back.to_dense()[1, 1].tolist() == [6, 8]
