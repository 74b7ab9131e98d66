"""`flambeau.export`: traces a model with torch.export, compiles it, and writes it to one file.

    flambeau.export(model, (x,), "model.flam", dynamic_shapes={"x": {0: torch.export.Dim("N")}})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import torch

import flambeau
from flambeau.config import config
from flambeau.errors import OptionError, UnsupportedError
from flambeau.ir.numerics import wants_bits
from flambeau.ir.program import BufferPlan, Program
from flambeau.pipeline import Options, lowered
from flambeau.runtime.plain_program import to_plain
from flambeau.schedule.plan import schedule

from .container import (
    CODE,
    DEVICE,
    INDEX,
    MAJOR,
    MINOR,
    PROGRAM,
    RUNTIME,
    TEXT,
    WEIGHTS,
    Section,
    packed,
    text_words,
    write,
)
from .device_code import CODES, DeviceCode
from .machine_code import CpuCode, build_device_runtime, build_runtime, quick_checksum
from .plan import INPUT, WEIGHT, Plan, Role, fault_texts, missing_operators
from .signature import Key, signer
from .trace import Method, copied_results, refused, traced
from .weights import Weights

TargetCode: TypeAlias = CpuCode | DeviceCode
Subject: TypeAlias = torch.nn.Module | Callable[..., Any] | torch.export.ExportedProgram


def export(model: Subject | None, args: tuple[Any, ...] = (), path: str | PathLike[str] = "model.flam", *,
           kwargs: Mapping[str, Any] | None = None, targets: Sequence[str] = ("cpu",), dynamic_shapes: Any = None,
           numerics: str | None = None,
           methods: Mapping[str, tuple[Any, ...]] | None = None, metadata: Mapping[str, str] | None = None,
           debug: bool = True, torch_operators: bool = False, sign: Key | None = None) -> str:
    """Write a package. Returns the hash of its content.

    `model`: a module, a function, or an ExportedProgram of torch.export (without `args` and `dynamic_shapes`, which it
    contains). `methods`: more entry points, by name: (function or module, arguments[, dynamic_shapes]). Weights that
    several methods use are stored once. `debug`: store programs and kernel sources, for `flambeau inspect`.
    `torch_operators`: call torch for operators without a kernel of ours, so that the package needs torch; otherwise
    they are refused. `sign`: a private Ed25519 key in PEM format that signs the file."""
    signs = None if sign is None else signer(sign)  # a wrong key is refused before anything is compiled
    given: dict[str, tuple[Any, ...]] = {} if model is None else {"forward": (model, args, dynamic_shapes, kwargs)}
    given |= methods or {}
    if not given:
        raise OptionError("nothing to export: neither a model nor methods were given")
    exact = wants_bits(numerics or config.numerics)
    weights = Weights()
    found = [traced(name, weights, exact, *how) for name, how in given.items()]
    built = {target: code_of(target) for target in targets}
    missing: dict[str, list[str]] = {}
    by_torch: dict[str, None] = {}
    for method in found:
        made: dict[int, tuple[Program, list[Any]]] = {}  # several targets may share a program and its texts
        for target, code in built.items():
            if id(code.target) not in made:
                made[id(code.target)] = compiled(method, code, numerics or config.numerics)
            program, texts = made[id(code.target)]
            lacking, left = missing_operators(program, torch_operators and not code.is_device)
            if left and isinstance(code, CpuCode):
                code.features = f"{code.features.removesuffix(' torch')} torch"
            by_torch |= dict.fromkeys(left)
            if lacking:
                missing[f"{method.name}, {target}"] = lacking
            else:
                compile_for(method, target, code, program, texts, weights)
    if missing:
        raise refused(missing)
    about = {"producer": f"flambeau {flambeau.__version__}", "format": f"{MAJOR}.{MINOR}",
             "numerics": numerics or config.numerics, "methods": json.dumps([m.structure for m in found]),
             **({"torch": ", ".join(by_torch)} if by_torch else {}), **weights.other_names(), **(metadata or {})}
    sections = sections_of(found, built, weights, about, debug)
    return write(path, sections, quick_checksum, signs)


def code_of(target: str) -> TargetCode:
    kinds: dict[str, Callable[[str], TargetCode]] = {"cpu": CpuCode, **CODES}
    kind = target.partition(":")[0]
    if kind not in kinds:
        raise OptionError(f"packages have no target {target!r}", hint=f"there are {', '.join(kinds)}")
    return kinds[kind](target)


def compiled(m: Method, code: TargetCode, numerics: str) -> tuple[Program, list[Any]]:
    """Compiles a method for a target. Returns its program and the sources of its kernels."""
    graph = m.graph
    while True:
        device, target, captured = lowered(graph, Options(numerics=numerics), target=code.target)
        if device.type != "cpu":
            raise UnsupportedError(f"the model is on {device}: packages are made of models on the CPU",
                                   hint='export model.to("cpu"), with arguments there')
        program = schedule(captured.graph, captured.graph.capabilities, bool(config.verify))
        # On a device a copy step makes one memory copy per contiguous piece. So results that are not written directly
        # are copied by kernels: the graph is compiled again with clones of them.
        again = copied_results(graph, program) if code.is_device else None
        if again is None:
            texts = [target.render(k, f"k{i}") for i, k in enumerate(program.kernels)]
            return program, target.named(program.kernels, texts)
        graph = again


def compile_for(m: Method, target: str, code: TargetCode, program: Program, texts: list[Any], weights: Weights) -> None:
    entries = [code.add(k, text) for k, text in zip(program.kernels, texts, strict=True)]
    roles = [Role(weights.place(r.which), r.which) if r.place == WEIGHT else r for r in m.roles]
    plan = Plan(program, roles, entries, weights.add_constant)
    by_role = {(r.place, r.which): n for n, r in zip(program.arguments, roles, strict=True)}
    inputs: list[BufferPlan] = [program.places[by_role[INPUT, k]] for k in range(len(m.inputs))]
    m.programs[target] = plan.encoded(inputs)
    m.plain[target] = to_plain(program)
    m.texts[target] = "\n".join(f"// {', '.join(k.origins)}\n{text.text}"
                                for k, text in zip(program.kernels, texts, strict=True))
    for k, entry in zip(program.kernels, entries, strict=True):
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in k.params})
        code.kernels.setdefault(entry, (", ".join(dict.fromkeys(k.origins)), ", ".join(dtypes)))


def sections_of(methods: list[Method], built: dict[str, TargetCode], weights: Weights, about: dict[str, str],
                debug: bool) -> list[Section]:
    data, rows = weights.encoded()
    if debug:
        about["kernels"] = json.dumps({target: [[*what, code.kernel_bytes(k)] for k, what in code.kernels.items()]
                                       for target, code in built.items()})
    words: list[int] = [len(about), *(x for pair in about.items() for text in pair for x in text_words(text))]
    words += [len(rows), *(x for row in rows for x in row), len(methods)]
    for m in methods:
        words += text_words(m.name)
        for ports in (m.inputs, m.outputs):
            words += [len(ports), *(x for port in ports for x in port.words())]
    words += [len(fault_texts()), *(x for text in fault_texts() for x in text_words(text)), len(built)]
    for k, (target, code) in enumerate(built.items()):
        words += [*text_words(target), *text_words(code.features), 3 + k]
        for m in methods:
            words += [len(m.programs[target]), *m.programs[target]]
    out = [Section(INDEX, "index", packed(words)), Section(WEIGHTS, "weights", data),
           Section(RUNTIME, "runtime", build_runtime()),
           *(Section(DEVICE if code.is_device else CODE, target, code.code) for target, code in built.items())]
    # Metal's runtime is compiled together with the program that uses it: the exporting machine may be no Mac.
    kinds = dict.fromkeys(target.partition(":")[0] for target, code in built.items() if code.is_device)
    out += [Section(RUNTIME, f"runtime {kind}", build_device_runtime(kind)) for kind in kinds if kind != "metal"]
    if debug:
        for m in methods:
            for target in built:
                out += [Section(PROGRAM, f"{m.name} {target}"[:63], m.plain[target]),
                        Section(TEXT, f"{m.name} {target}"[:63], m.texts[target].encode())]
    return out


