"""The cache of whole graphs: which entries a later process finds, which it must not find, and what stays untouched."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from random import SystemRandom
from string import ascii_lowercase
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flambeau
from flambeau.codegen.source import KernelSource
from flambeau.compile import disk_cache as graph_cache
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.ir.capabilities import Capabilities
from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.targets import identity
from flambeau.targets.cpu.target import CpuTarget


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives each test its own entries in the shared cache, which already has the compiler's probes."""
    monkeypatch.setattr(graph_cache, "SUFFIX", ".graph" + "".join(SystemRandom().choices(ascii_lowercase, k=12)))
    torch._dynamo.reset()
    graph_cache.stats.clear()
    with config.override(verify=False):  # the verifier always compiles
        yield


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """The cache's counters after something was compiled as in a new process."""
    torch._dynamo.reset()
    graph_cache.stats.clear()
    call()
    for keeper in list(graph_cache.keepers):
        keeper.join(60)
    return dict(graph_cache.stats)


def smooth(x: Tensor) -> Tensor:
    return (x.sin() * x).softmax(-1)


def compile_and_run(f: Callable[..., Any] = smooth, *args: Any, **options: Any) -> Callable[[], Any]:
    inputs = args or (torch.linspace(-1, 1, 24).view(4, 6),)
    return lambda: torch.compile(f, backend="flambeau", **options)(*inputs)


def entries() -> list[Any]:
    return sorted(config.cache_dir.glob(f"*{graph_cache.SUFFIX}"))


# ---- another process -----------------------------------------------------------------------------------

CHILD = """
import json, sys
import torch
from torch import nn
from flambeau.compile import disk_cache as graph_cache
graph_cache.SUFFIX = sys.argv[1]

def run(module, *inputs, dynamic=None):
    torch.manual_seed(7)
    out = torch.compile(module, backend="flambeau", dynamic=dynamic)(*inputs)
    out.square().sum().backward()
    return out.detach().tolist()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 3))
results = [run(net, torch.randn(5, 6)) for _ in range(2)]
results += [p.grad.tolist() for p in net.parameters()] + [b.tolist() for b in net.buffers()]

def update(x, seen):
    seen.add_(x.detach().mean(0))
    return (x * seen).tanh() @ x.t()

seen = torch.zeros(4)
for n in (3, 5, 9):
    x = torch.arange(4.0 * n).view(n, 4).div(10).requires_grad_()
    results += [run(update, x, seen, dynamic=True), x.grad.tolist()]
results += [seen.tolist()]
with torch.no_grad():
    results += [torch.compile(lambda x: x.cumsum(0), backend="flambeau")(torch.ones(4)).tolist()]
for keeper in list(graph_cache.keepers):
    keeper.join()
traced = torch._dynamo.utils.counters["aot_autograd"]["total"]
compiler = "flambeau.pipeline" in sys.modules
print(json.dumps([results, dict(graph_cache.stats), traced, compiler]))
"""


def child() -> list[Any]:
    command = [sys.executable, "-c", CHILD, graph_cache.SUFFIX]
    # Set in the environment: the suite turns the verifier on, and an override does not reach a child process.
    env = {**os.environ, "FLAMBEAU_VERIFY": "0", "FLAMBEAU_GRAPH_CACHE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def test_a_second_process_neither_traces_nor_compiles() -> None:
    """Results, gradients, updated buffers, dropout's numbers, sizes that vary: all as in the first one."""
    first, stats, traced, compiler = child()
    assert stats == {"miss": 3, "stored": 3} and traced == 3 and compiler
    second, stats, traced, compiler = child()
    assert stats == {"hit": 3} and traced == 0 and not compiler
    assert second == first


# ---- found, and not found ------------------------------------------------------------------------------


def test_the_same_graph_is_found() -> None:
    assert counted(compile_and_run()) == {"miss": 1, "stored": 1}
    assert counted(compile_and_run()) == {"hit": 1}
    assert len(entries()) == 1


@pytest.mark.parametrize("change", [
    lambda: compile_and_run(options={"numerics": "eager"}),
    lambda: compile_and_run(smooth, torch.linspace(-1, 1, 24).view(6, 4)),
    lambda: compile_and_run(smooth, torch.linspace(-1, 1, 24).view(6, 4).t()),
    lambda: compile_and_run(smooth, torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)),
    lambda: compile_and_run(smooth, torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()),
    lambda: compile_and_run(lambda x: (x.sin() * x).softmax(0)),
    lambda: compile_and_run(lambda x: (x * x.sin()).softmax(-1)),
], ids=["option", "shape", "strides", "dtype", "gradient", "argument", "order"])
def test_another_graph_is_not_found(change: Callable[[], Callable[[], Any]]) -> None:
    counted(compile_and_run())
    assert counted(change()) == {"miss": 1, "stored": 1}


def test_other_versions_and_machines_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(compile_and_run())
    changes: list[tuple[Any, str, Any]] = [
        (torch, "__version__", "2.99"),
        (sys, "version", "3.99"),
        (identity, "source_digest", lambda: "other"),
        (CpuTarget, "capabilities", lambda self: Capabilities("cpu", ordered_scatter=True, programs=2)),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert counted(compile_and_run())["miss"] == 1, name
    assert counted(compile_and_run()) == {"hit": 1}


def test_torch_state_is_part_of_it() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    product = compile_and_run(lambda x: x @ x.t(), x)
    counted(product)
    for state in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with state:
            assert counted(product)["miss"] == 1
    assert counted(product) == {"hit": 1}


def test_source_that_changed_under_the_process_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "LOADED", 0.0)
    identity.source_digest.cache_clear()
    assert counted(compile_and_run()) == {"refused": 1}


def test_sizes_that_an_entry_was_not_compiled_for() -> None:
    """Two compilations of one graph that assume different things about a size: both are kept and found."""

    def f(x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] % 2 else x.cos()

    def run(n: int) -> None:
        x = torch.linspace(0, 1, n)
        torch.testing.assert_close(torch.compile(f, backend="flambeau", dynamic=True)(x), f(x))

    assert counted(lambda: run(7))["stored"] == 1
    assert counted(lambda: run(8))["stored"] == 1
    assert counted(lambda: (run(11), run(12))) == {"hit": 2}


def test_graphs_that_are_not_from_dynamo() -> None:
    """A graph that somebody hands to the backend says nothing of its inputs, so it is not kept."""
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    graph.output(tuple(graph.call_function(f, (given,)) for f in (torch.sin, torch.cos)))
    backend = torch._dynamo.lookup_backend("flambeau")
    for x in (torch.ones(3), torch.ones(2, 5)):
        made = backend(torch.fx.GraphModule(torch.nn.Module(), graph), [x])
        torch.testing.assert_close(tuple(made(x)), (x.sin(), x.cos()))
    assert not entries()


def test_a_float_that_an_operator_fixes() -> None:
    """Where torch has no tensor for a float it is a constant, with a guard that an entry does not have."""
    x = torch.linspace(-4, 4, 12)

    def run(f: Callable[..., Tensor]) -> None:
        made = torch.compile(f, backend="flambeau")
        for number in (0.5, 2.25, -1.5, 3.0):
            torch.testing.assert_close(made(x, number), f(x, number))

    assert counted(lambda: run(lambda x, number: x.clamp(max=number) + x * number)).keys() == {
        "miss", "stored", "refused"}
    assert counted(lambda: run(lambda x, number: x * number)) == {"miss": 2, "stored": 2}


# ---- what is wrong is compiled again -------------------------------------------------------------------


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"x" + data[1:], lambda data: b""])
def test_a_damaged_entry(damage: Callable[[bytes], bytes]) -> None:
    x = torch.randn(4, 6)
    counted(compile_and_run(smooth, x))
    path, = entries()
    path.write_bytes(damage(path.read_bytes()))
    run = compile_and_run(smooth, x)
    assert counted(run) == {"miss": 1, "stored": 1}
    assert counted(lambda: torch.testing.assert_close(run(), smooth(x))) == {"hit": 1}


def test_an_entry_that_does_not_load(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Well sealed, and yet of no use: not such data, or with a kernel that does not build any more."""
    counted(compile_and_run())
    path, = entries()
    graph_cache.GraphCache.disk().put(path.name.partition(".")[0], b"no entry", graph_cache.SUFFIX)
    with caplog.at_level(logging.WARNING, logger=flambeau.__name__):
        flambeau_log = logging.getLogger(flambeau.__name__)
        monkeypatch.setattr(flambeau_log, "propagate", True)
        assert counted(compile_and_run()) == {"miss": 1, "stored": 1}
        assert "does not load" in caplog.text

        def broken(self: LaunchPlan) -> Any:
            raise CompileError("no compiler")

        with monkeypatch.context() as patch:
            patch.setattr(LaunchPlan, "load", broken)
            assert counted(compile_and_run()) == {"miss": 1, "stored": 1}
    assert counted(compile_and_run()) == {"hit": 1}


def test_a_kernel_that_does_not_build_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if only the backward is affected, and was not called: a later process could not load the entry."""
    real = CpuTarget.render

    def broken(target: CpuTarget, kernel: Any, name: str) -> KernelSource:
        source = real(target, kernel, name)
        return KernelSource(name, "#error no\n") if "softmax_backward" in str(kernel.origins) else source

    run = compile_and_run(smooth, torch.linspace(-1, 1, 24).view(4, 6).requires_grad_())
    with monkeypatch.context() as patch:
        patch.setattr(CpuTarget, "render", broken)
        for _ in range(2):
            assert counted(run) == {"miss": 1, "refused": 1}
            assert not entries()
    assert counted(run) == {"miss": 1, "stored": 1}


# ---- what is left alone --------------------------------------------------------------------------------


def outside(x: Tensor) -> Tensor:
    return x + 1


def test_graphs_without_a_key() -> None:
    whole = torch.randn(8, 6)
    assert counted(compile_and_run(lambda a, b: a.add_(b), whole[:6], whole[2:])) == {"refused": 1}
    torch.compiler.allow_in_graph(outside)
    assert counted(compile_and_run(lambda x: outside(x).sin())) == {"refused": 1}
    assert not entries()


def test_the_setting_turns_it_off() -> None:
    counted(compile_and_run())
    with config.override(graph_cache=False):
        assert counted(compile_and_run()) == {}
    with torch.compiler.config.patch(force_disable_caches=True):
        assert counted(compile_and_run()) == {}


def test_inductor_keeps_its_own_cache() -> None:
    """Torch's cache of AOTAutograd is borrowed for the length of a compilation, and given back."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    before = AOTAutogradCache.save, AOTAutogradCache._lookup
    counted(compile_and_run())
    assert before == (AOTAutogradCache.save, AOTAutogradCache._lookup)


# ---- as good as compiled -------------------------------------------------------------------------------


def test_a_backward_that_runs_twice() -> None:
    def run() -> None:
        x = torch.randn(4, 5, requires_grad=True)
        y = torch.compile(lambda x: (x.tanh() * x.exp()).sum(1), backend="flambeau")(x)
        y.sum().backward(retain_graph=True)
        once = x.grad.clone()
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * once)

    assert counted(run)["stored"] == 1
    assert counted(run) == {"hit": 1}


def test_constants_parameters_and_optimizers() -> None:
    table = torch.arange(12.0).view(3, 4)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        step = torch.optim.NAdam(net.parameters(), lr=0.1, foreach=True)
        model = torch.compile(lambda x: net(x) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + table, backend="flambeau")
        update = torch.compile(step.step, backend="flambeau")
        for _ in range(2):
            F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 4)).backward()
            update()
        return [p.detach().clone() for p in net.parameters()]

    found: list[list[Tensor]] = []
    assert counted(lambda: found.append(run()))["stored"] >= 2
    stats = counted(lambda: found.append(run()))
    assert stats["hit"] >= 2 and "miss" not in stats
    for a, b in zip(*found):
        assert torch.equal(a, b)
