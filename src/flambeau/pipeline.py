"""Turns a captured graph into a function that runs: capture, schedule, generate code, build, execute."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from flambeau.capture.graph import Captured, capture
from flambeau.capture.stream_turns import is_streamed
from flambeau.config import config
from flambeau.errors import CompileError, UnsupportedError
from flambeau.ir.numerics import policy_of
from flambeau.ir.program import AttentionKernel, ContractKernel, Fence, Launch, LoopKernel, Program, ScanKernel
from flambeau.product_choice import own_products
from flambeau.runtime.executor import write
from flambeau.runtime.launch_plan import LaunchPlan, Run
from flambeau.runtime.placement import graph_device, has_streams, target_of
from flambeau.runtime.progress import progress
from flambeau.runtime.recordable import recordable
from flambeau.runtime.recording import function_now
from flambeau.runtime.result_checks import promises_of
from flambeau.runtime.streams.host_copies import NOTES, link_rate
from flambeau.runtime.watchers import BOUND
from flambeau.schedule.plan import schedule
from flambeau.schedule.streams.offload import COPIES, moves, offloaded
from flambeau.schedule.streams.overlap import overlapped
from flambeau.schedule.streams.waits import on_own_streams
from flambeau.targets.background import Closing, check, fork_safe
from flambeau.targets.base import Build, Target
from flambeau.torch_compat.fake import unset_fake_temporarily
from flambeau.torch_compat.logs import artifact_log

log = logging.getLogger(__name__)
# Logs that TORCH_LOGS enables under the names that other backends use too.
ARTIFACTS = {name: artifact_log(__name__, name)
             for name in ("output_code", "kernel_code", "schedule", "fusion", "perf_hints")}
LOCK = fork_safe(threading.RLock())  # expressions are interned process-wide: one compile at a time


@dataclass(frozen=True)
class Options:
    """How graphs are compiled. A backward uses its forward's options, whatever the settings at the time."""

    numerics: str = "fast"
    target: str | None = field(default_factory=lambda: config.target)  # None: the target of the graph's device
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    contractions: str = field(default_factory=lambda: config.contractions)  # kernels: library, own or choose
    search: bool = False  # time other block shapes at the first call
    graphs: bool = False  # record runs, and replay them
    streams: str | None = None  # "auto": run steps in parallel on the program's own streams
    offload: str | float | None = None  # how much less of the saved tensors is kept on the device
    part: bool = False  # one piece of a graph whose other pieces assume the strides of torch's metadata


@dataclass(eq=False)
class Compiled:
    """A graph that is becoming runnable: its kernels build in the background until the first call."""

    gm: fx.GraphModule
    captured: Captured
    program: Program
    texts: list[Any]
    build: Build | None
    package: LaunchPlan
    options: Options
    seconds: dict[str, float] = field(default_factory=dict)
    run: Run | None = None
    exclude: frozenset[str] = frozenset()
    function: Hashable = field(default_factory=function_now)  # the function that this graph is part of

    def finish(self) -> Run:
        with LOCK:
            if self.run is not None:
                return self.run
            start = time.perf_counter()
            kernels = {}
            if self.build is not None:
                with progress("building kernels", count=self.build.count):
                    kernels = self.waited(self.build)
            self.seconds["wait for compiler"] = time.perf_counter() - start
            bad = {int(k[1:]): e for k, e in kernels.items() if isinstance(e, CompileError)}
            if bad:
                return self.retry(bad)
            self.run = self.package.bind(kernels, self.function)
            BOUND.add(self)
            return self.run

    def bind_again(self) -> None:
        if self.package.graphs is None:  # recordings would be lost
            self.run = self.package.bind(self.package.built(), self.function)

    def waited(self, build: Build) -> dict[str, Any]:
        try:
            return build.wait()
        except Closing:
            check()
            again = self.package.build()  # built in this thread, because the program runs while the process ends
            assert again is not None
            return again.wait()

    def retry(self, bad: dict[int, CompileError]) -> Run:
        """Compile again without the kernels that do not build: their operators run as ATen."""
        origins = {o for s in self.program.steps if isinstance(s, Launch) and s.kernel in bad for o in s.origins}
        first = next(iter(bad.values()))
        warnings.warn(f"flambeau: {len(bad)} kernel(s) did not build; their operators ({', '.join(sorted(origins))}) "
                      f"run as ATen. Please report this with the following text.\n{first}",
                      RuntimeWarning, stacklevel=2)
        if origins <= self.exclude:
            if is_streamed(self.gm):
                raise first
            self.run = interpret(self.gm)
            return self.run
        self.run = compile_graph(self.gm, self.options, self.exclude | origins)
        return self.run


OBSERVERS: list[Callable[[Compiled], None]] = []  # called with every compiled graph; see flambeau.debug


def boxed(c: Compiled) -> Run:
    """Wrap a graph in a plain function: AOTAutograd's wrappers keep attributes of functions, not those of objects."""

    def run(args: list[Any]) -> list[Any]:
        return (c.run or c.finish())(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    run.compiled = c  # type: ignore[attr-defined]
    return run


def compile_graph(gm: fx.GraphModule, options: Options | None = None, exclude: frozenset[str] = frozenset()) -> Run:
    """A boxed function for a functional ATen graph. A graph that cannot be compiled runs as ATen, with one warning."""
    try:
        return boxed(compiled(gm, options or Options(), exclude))
    except CompileError:
        raise
    except Exception as e:  # whatever is wrong with the compiler, the model must run
        if config.verify or is_streamed(gm):  # interpreted, everything would run on one stream
            raise
        warnings.warn(f"flambeau: this graph runs as ATen because it could not be compiled: {type(e).__name__}: {e}. "
                      "Please report it.", RuntimeWarning, stacklevel=2)
        return interpret(gm)


def compiled(gm: fx.GraphModule, options: Options, exclude: frozenset[str] = frozenset()) -> Compiled:
    """Compile a graph up to its package; raises the error that says why it cannot be compiled."""
    # Tensors held by the graph are real, and are read while AOTAutograd's fake mode is active.
    with LOCK, unset_fake_temporarily():
        return _compile(gm, options, exclude)


def lowered(gm: fx.GraphModule, options: Options, exclude: frozenset[str] = frozenset(), target: Target | None = None,
            own: frozenset[str] | None = None) -> tuple[torch.device, Target, Captured]:
    """Lower a graph to the loop language; returns it with its device and target. `target` overrides that of the
    options. `own`: the products that our kernels compute, if that is decided already."""
    device = graph_device(gm)
    target = target or target_of(device, options.target)
    if target is None:
        raise UnsupportedError(f"there is no target for tensors on {device}")
    with LOCK, unset_fake_temporarily(), target.on(device):
        caps = replace(target.capabilities(), deterministic=options.deterministic)
        policy, notes = policy_of(options.numerics, device.type), list[str]()
        if own is None:
            own = frozenset(n.name for n in gm.graph.nodes) if options.contractions == "own" else frozenset()
            # The kernel that is chosen by timing may round differently.
            if options.contractions == "choose" and target.times and not (policy.exact or options.deterministic):
                own, notes = own_products(gm, target, caps, partial(region_run, options), exclude)
        captured = capture(gm, caps, exclude, device, policy, frozenset() if policy.exact else own)
        captured.choices = notes
        return device, target, captured


def region_run(options: Options, gm: fx.GraphModule, own: frozenset[str]) -> Run:
    """Compile part of a graph with these products as our kernels, each in its fastest block shape."""
    return boxed(_compile(gm, replace(options, graphs=False, streams=None), frozenset(), own))


def _compile(gm: fx.GraphModule, options: Options, exclude: frozenset[str], own: frozenset[str] | None = None
             ) -> Compiled:
    """Run all phases of compilation. `own`: the products that our kernels compute, if decided; then no observers."""
    t0 = time.perf_counter()
    device, target, captured = lowered(gm, options, exclude, own=own)
    t1 = time.perf_counter()
    with target.on(device):
        check()
        program = schedule(captured.graph, captured.graph.capabilities, bool(config.verify))
        t2 = time.perf_counter()
        check()
        written = target.bounded if config.verify is True else target.render
        texts = [written(k, f"k{i}") for i, k in enumerate(program.kernels)]
        if not options.deterministic:  # variants that are chosen by timing may round differently
            timed: tuple[type, ...] = (ContractKernel,) if options.contractions == "choose" else ()
            timed += (AttentionKernel,) if timed and target.times else ()
            timed = (AttentionKernel, LoopKernel, ScanKernel, ContractKernel) if options.search else timed
            texts = [target.variants(k, text) if isinstance(k, timed) else text
                     for k, text in zip(program.kernels, texts, strict=True)]
        texts = target.named(program.kernels, texts)
        t3 = time.perf_counter()
        build = target.build(texts) if texts else None
    promises = promises_of(gm, captured.symbols.index) if config.verify is True else None
    if gm.meta.get(NOTES):
        program = replace(program, notes=(*program.notes, *gm.meta[NOTES]))
    recordings, fence = None, None
    if moves(program):
        caps = captured.graph.capabilities
        program = offloaded(program, caps.tuning, link_rate(target, device), caps.arena_most, options.graphs)
        fence = Fence((COPIES,)) if options.graphs else None
    if options.graphs:
        recordings = recordable(program, gm, device)
        if program.streams and fence is None and not recordings.obstacle:
            program, fence = on_own_streams(program)
            recordings = recordable(program, gm, device)
    package = replace(write(program, target.name, texts, device, promises), graphs=recordings, fence=fence)
    if options.streams == "auto" and not program.streams and has_streams(device):
        tuning = captured.graph.capabilities.tuning
        found = overlapped(program, tuning, tuning.launch_recorded if options.graphs else None)
        if found is not None:
            beside = write(found, target.name, texts, device, promises)
            package = replace(package, beside=replace(
                beside, graphs=recordable(found, gm, device) if options.graphs else None))
            program = found
    seconds = {"lower": t1 - t0, "schedule": t2 - t1, "codegen": t3 - t2}
    made = Compiled(gm, captured, program, texts, build, package, options, seconds, exclude=exclude)
    for observe in OBSERVERS if own is None else ():
        observe(made)
    tell(made)
    return made


def tell(made: Compiled) -> None:
    """Write what was compiled to torch's logs."""
    if not any(a.isEnabledFor(logging.DEBUG) for a in (log, *ARTIFACTS.values())):
        return
    texts = {t.title or t.name: t.text for t in made.texts}
    missing = (f"{op}{f' ({n} times)' * (n > 1)} is not compiled: ATen is called"
               for op, n in made.captured.externs.items())
    said = {"output_code": [made.package.source, *texts.values()], "kernel_code": texts.values(),
            "schedule": [made.program], "fusion": made.program.notes, "perf_hints": missing}
    for name, parts in said.items():
        for part in parts:
            ARTIFACTS[name].debug("%s", part)
    operators = sum(n.op == "call_function" for n in made.gm.graph.nodes)
    log.debug("%d operators became %d kernel(s): %s", operators, len(texts),
              ", ".join(f"{phase} {s:.3f} s" for phase, s in made.seconds.items()))


def interpret(gm: fx.GraphModule) -> Run:
    """Run the graph without compiling it, operator by operator."""

    def run(args: list[Any]) -> list[Any]:
        taken = list(args)
        args.clear()
        with torch.no_grad():
            return list(fx.Interpreter(gm).run(*taken))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
