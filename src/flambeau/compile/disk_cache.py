"""Stores whole compiled graphs on disk, so that later processes neither trace nor compile them.

An entry is what torch's own AOTAutograd cache would keep (wrappers for mutation, aliasing and autograd, and guards on
sizes), with our packages for forward and backward inside. It is plain data from a closed table of types
(`cache_entry.py`). It is stored in the kernel cache, sealed and limited in size like a kernel, under the key of
Dynamo's graph. If anything is wrong with an entry, the graph is compiled again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.compiler.config
import torch.fx as fx

from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.runtime.launch_plan import LaunchPlan, Run
from flambeau.runtime.plain_data import Unwritable
from flambeau.runtime.watchers import BOUND
from flambeau.targets.background import Closing, start
from flambeau.targets.base import Build, Target
from flambeau.targets.cache import DiskCache, shared_cache
from flambeau.targets.identity import Uncacheable
from flambeau.torch_compat import patches
from flambeau.torch_compat.aot import AOT_COUNTER, SerializableAOTDispatchCompiler, check_cacheable
from flambeau.torch_compat.aot import config as aot_config
from flambeau.torch_compat.fake import TracingContext, fixes_floats
from flambeau.torch_compat.inductor import OutputCode
from flambeau.torch_compat.inductor import config as inductor_config

from .cache_entry import decode, encode
from .cache_key import graph_key, held
from .fast_call import short_way

log = logging.getLogger(__name__)

SUFFIX = ".graph"
PLACES = 4  # entries per key: graphs with symbolic sizes that differ in their assumptions about the sizes
SHARE = 8  # an entry larger than 1/8 of the cache limit (a graph that holds tensors) is not kept

stats: Counter[str] = Counter()  # hit, miss, stored, refused
# Threads that wait for the kernels of a graph before storing it.
keepers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Stored(OutputCode):
    """A package wrapped as AOTAutograd's entries expect it: callable once `post_compile` has loaded it."""

    def __init__(self, package: LaunchPlan | None, build: Build | None = None) -> None:
        super().__init__()
        self.package = package  # None: the graph has no package, so its entry is not kept
        self.build = build  # compiles the package's kernels; only set in the process that compiled it

    def __call__(self, inputs: Any) -> Any:
        return self.run(inputs)

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        assert self.package is not None
        self.run: Run = self.package.load()
        BOUND.add(self)
        self._boxed_call = True  # on the instance, as wrappers copy its attributes but not those of its class

    def bind_again(self) -> None:
        if self.package is not None and self.package.graphs is None:  # recordings would be lost
            self.run = self.package.load()

    __hash__ = object.__hash__  # torch's class is not hashable


class GraphCache:
    """The disk cache as seen by one graph. Without a key, nothing is stored."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any],
                 target: Target | None) -> None:
        self.inputs = list(inputs)
        self.held = list(held(gm).values())
        self.key: str | None = None
        self.free: str | None = None  # the place for a new entry
        wanted = config.graph_cache and not config.verify and not torch.compiler.config.force_disable_caches
        wanted = wanted and config.debug < 2  # an entry holds kernels, but not the report of how operators were fused
        # Only Dynamo's graphs describe their inputs.
        if wanted and target is not None and TracingContext.try_get() is not None:
            try:
                self.key = graph_key(gm, inputs, settings, target)
            except Exception as reason:  # Uncacheable, or an unforeseen kind of input
                self.refuse(reason)

    # ---- look up ---------------------------------------------------------------------------------------

    def load(self) -> Callable[..., Any] | None:
        """The compiled function of an earlier process, ready to call; None if there is none."""
        if self.key is None:
            return None
        disk = self.disk()
        places = [hashlib.sha256(f"{self.key} {k}".encode()).hexdigest() for k in range(PLACES)]
        self.free = places[0]
        for place in reversed(places):
            data = disk.read(place, SUFFIX)
            if data is None:
                self.free = place
                continue
            try:
                entry = decode(data)
                if self.fits(entry):
                    made = self.restore(entry)
                    stats["hit"] += 1
                    return made
            except Exception as error:  # malformed, or a kernel that does not build any more
                name = type(error).__name__
                log.warning("a cached graph does not load, and is compiled again: %s: %s", name, error)
                self.free = place
        stats["miss"] += 1
        return None

    def fits(self, entry: Any) -> bool:
        """Whether the sizes of this call satisfy the guards that the entry was compiled with."""
        if not entry.guards_expr:
            return True
        sizes = [x.node.hint for x in self.inputs if isinstance(x, torch.SymInt)]
        fake = TracingContext.get().fake_mode
        env = fake.shape_env if fake is not None else None
        return env is not None and bool(env.evaluate_guards_expression(entry.guards_expr, sizes))

    def restore(self, entry: Any) -> Callable[..., Any]:
        entry.sanitized_aot_config.aot_id = next(AOT_COUNTER)
        run = entry.wrap_post_compile([*self.held, *self.inputs], entry.sanitized_aot_config, {})
        first = self.held

        def forward(*args: Any) -> Any:
            return run([*first, *args])

        return short_way(run, first) or torch.compiler.disable(forward, reason="do not trace AOT-compiled graph")

    # ---- keep ------------------------------------------------------------------------------------------

    def compiler(self, compile_graph: Callable[[fx.GraphModule], Run]) -> Callable[..., Any]:
        """A compiler for AOTAutograd. Its results carry their packages if they are to be stored."""

        def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Run:
            run = compile_graph(graph)
            # A backward that reuses the memory of its saved tensors cannot run twice. Ours then works on copies, but
            # torch would refuse retain_graph.
            if (context := TracingContext.try_get()) and context.fw_metadata is not None:
                context.fw_metadata.bw_donated_idxs = []
            if self.key is None:
                return run
            made = getattr(run, "compiled", None)
            run.__wrapped__ = Stored(made.package, made.build) if made else Stored(None)  # type: ignore[attr-defined]
            return run

        return compiled if self.key is None else SerializableAOTDispatchCompiler(
            Stored, compiled)  # type: ignore[arg-type]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While active, torch's AOTAutograd cache passes new entries to us and finds none itself."""
        if self.key is None:
            yield
            return

        def key_of(mod: fx.GraphModule, *_: Any, **__: Any) -> tuple[str | None, list[str]]:
            check_cacheable(mod)  # raises for graphs that torch does not trust; these get no entry
            return self.key, []

        def save(original: Callable[..., None], key: str, entry: Any, remote: bool) -> None:
            parts = [p.result for p in (entry.compiled_fw, entry.compiled_bw) if hasattr(p, "result")]
            if any(isinstance(part, Stored) for part in parts):
                self.store(entry, parts)
            else:  # an entry of Inductor, which compiles in another thread
                original(key, entry, remote)

        # An entry holds forward and backward, so the backward is compiled now, and its kernels build in parallel with
        # the forward's.
        at_once = aot_config.patch(
            enable_autograd_cache=True, bundled_autograd_cache=True, force_non_lazy_backward_lowering=True)
        with at_once, inductor_config.patch(fx_graph_cache=True), patches.CACHE.applied(key_of, save):
            yield

    def store(self, entry: Any, parts: Sequence[Stored]) -> None:
        """Store an entry as soon as all of its kernels are built."""
        assert self.free is not None
        disk = self.disk()
        try:
            if any(part.package is None for part in parts):
                raise Uncacheable("a part of it runs as ATen")
            if fixes_floats(TracingContext.get().fake_mode):  # an entry has guards on sizes alone
                raise Uncacheable("it is for some values of a float only")
            data = encode(entry)
            if len(data) > disk.limit // SHARE:
                raise Uncacheable(f"it takes {len(data)} bytes")
        except (Uncacheable, Unwritable) as reason:
            self.refuse(reason)
            return
        builds = [part.build for part in parts if part.build is not None]
        with suppress(Closing):
            keepers.add(start(self.keep, builds, disk, self.free, data, name="keep"))

    @classmethod
    def keep(cls, builds: Sequence[Build], disk: DiskCache, place: str, data: bytes) -> None:
        """Wait in a thread for all kernels, then store the entry. A backward that is never called is waited for by
        nobody else."""
        try:
            for build in builds:
                for kernel in build.wait().values():
                    if isinstance(kernel, CompileError):
                        raise kernel
            decode(data)  # nothing is stored that could not be read
        except Exception as reason:
            cls.refuse(reason)
        else:
            disk.put(place, data, SUFFIX)
            stats["stored"] += 1

    @staticmethod
    def refuse(reason: Exception) -> None:
        stats["refused"] += 1
        log.info("a graph is not cached: %s: %s", type(reason).__name__, reason)

    @staticmethod
    def disk() -> DiskCache:
        return shared_cache(config.cache_dir, config.cache_limit_mb)
