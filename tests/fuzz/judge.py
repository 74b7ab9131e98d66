"""Runs a program in eager and compiled, and says how they differ.

Values that are only moved or chosen, and whole numbers, must have eager's bits. Others may be as far from the float64
result as eager's are. Where eager is nearer than a rounding error by chance, the float64 run is repeated with noise of
one rounding per operator, which shows how far a result may move.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .metadata import by_metadata
from .program import Program, tracked
from .reference import Reference
from .seen import Call, Seen, call

DEVICE = "flambeau"
Backend = str | Callable[..., Any]
# Kinds of findings, the worst first.
KINDS = ("value", "gradient", "mutation", "bits", "gradient bits", "sharing", "shape", "raises", "no error", "warning",
         "gradients", "error type", "input layout", "input memory", "requires_grad", "identity", "strides", "offset",
         "strides of size one", "gradient strides", "layout of nothing")


@dataclass(frozen=True)
class Finding:
    kind: str
    detail: str
    call: int = 0


def bits_differ(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():
        # Zeros of different sign count as different, NaNs as equal.
        whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
        differ = (a.view(whole) != b.view(whole)) & ~(a.isnan() & b.isnan())
        return bool(differ.any())
    return not torch.equal(a, b)


def alike(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def too_far(ours: Tensor, eager: Tensor, reference: Reference, group: str, k: int) -> str | None:
    """Describes where our value is further from the float64 result than allowed; None if it is accepted."""
    if not ours.is_floating_point():
        return None if torch.equal(ours, eager) else "whole numbers differ"
    if torch.equal(ours, eager):
        return None
    want = reference.value(group, k)
    if want is None or want.shape != ours.shape:
        return None
    a, b, want = ours.double(), eager.double(), want.double()
    odd = ~(a.isfinite() & b.isfinite() & want.isfinite())
    if bool((odd & ~(alike(a, b) | alike(a, want))).any()):
        return "NaN or infinite in one of them"
    a, b, want = (x.where(~odd, 0.0) for x in (a, b, want))
    eps = torch.finfo(ours.dtype).eps
    off, theirs = (a - want).abs(), (b - want).abs()
    allowed = 2 * theirs.max() + 2 * eps * want.abs()
    if bool((off <= allowed).all()):
        return None
    noise = reference.noise(group, k)
    if noise is None:
        return None
    tiny = torch.finfo(ours.dtype).tiny
    bad = off > 4 * torch.maximum(noise, theirs) + 2 * eps * want.abs() + tiny
    if not bool(bad.any()):
        return None
    at = int((off * bad).argmax())
    return (f"{int(bad.sum())} of {bad.numel()} values, e.g. {a.flatten()[at]:.9g} for {b.flatten()[at]:.9g} "
            f"(float64: {want.flatten()[at]:.9g}, noise {noise.flatten()[at]:.2g})")


def differences(program: Program, number: int, eager: Call, ours: Call, exact: Mapping[str, bool],
                reference: Reference) -> list[Finding]:
    """The differences between our call and eager's."""
    out: list[Finding] = []

    def add(kind: str, detail: str) -> None:
        out.append(Finding(kind, detail, number))

    if eager.error is not None or ours.error is not None:
        a, b = eager.error, ours.error
        if a is None:
            add("raises", f"{type(b).__name__}: {str(b)[:300]}")
        elif b is None:
            add("no error", f"eager: {type(a).__name__}: {str(a)[:200]}")
        elif not isinstance(b, type(a)):
            add("error type", f"{type(b).__name__} for {type(a).__name__}: {str(b)[:120]!r} for {str(a)[:120]!r}")
        return out
    bits = program.numerics == "eager"
    names = [i.name for i in program.inputs]
    rows: list[tuple[str, int, str, Seen, Seen, bool]] = [
        ("result", k, n, ours.results[k], eager.results[k], exact.get(n, False)) for k, n in enumerate(program.results)]
    if len(eager.gradients) != len(ours.gradients):
        add("gradients", f"{len(ours.gradients)} for {len(eager.gradients)}")
    else:
        for k, (g, h) in enumerate(zip(ours.gradients, eager.gradients, strict=True)):
            if (g is None) != (h is None):
                add("gradients", f"gradient {k} is {'missing' if g is None else 'extra'}")
            elif g is not None and h is not None:
                rows.append(("gradient", k, f"gradient {k}", g, h, False))
    for group, k, name, a, b, known in rows:
        if a.dtype != b.dtype or a.shape != b.shape:
            add("shape", f"{name}: {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}")
            continue
        if a.stride != b.stride:
            named = all(m == n or size == 1 for m, n, size in zip(a.stride, b.stride, a.shape, strict=True))
            add("layout of nothing" if not a.value.numel() else "gradient strides" if group != "result" else
                "strides of size one" if named else "strides",
                f"{name} {list(a.shape)}: {a.stride} for {b.stride}")
        if a.offset != b.offset:
            add("offset" if a.value.numel() else "layout of nothing", f"{name}: {a.offset} for {b.offset}")
        if a.grad != b.grad:
            add("requires_grad", f"{name}: {a.grad} for {b.grad}")
        if bits and bits_differ(a.value, b.value):
            add("bits" if group == "result" else "gradient bits", f"{name}: {example(a.value, b.value)}")
        elif known and not bits and bits_differ(a.value + 0, b.value + 0):
            add("value", f"{name} (moved): {example(a.value, b.value)}")
        elif not known and not bits and (text := too_far(a.value, b.value, reference, group, k)):
            add("value" if group == "result" else "gradient", f"{name}: {text}")
    for k, (a, b, m, n) in enumerate(zip(ours.inputs, eager.inputs, ours.memory, eager.memory, strict=True)):
        if (a.shape, a.stride, a.offset) != (b.shape, b.stride, b.offset):
            add("input layout", f"{names[k]}: {a.shape}{a.stride}+{a.offset} for {b.shape}{b.stride}+{b.offset}")
        elif m.shape != n.shape:
            add("input memory", f"{names[k]}: {list(m.shape)} for {list(n.shape)}")
        elif (bits and bits_differ(m, n)) or (not bits and exact.get(names[k], False) and bits_differ(m + 0, n + 0)):
            add("mutation", f"{names[k]}: {example(m, n)}")
        elif not bits and (text := too_far(m, n, reference, "memory", k)):
            add("mutation", f"{names[k]}: {text}")
    if ours.shared != eager.shared:
        every = names + list(program.results)
        pairs = [p for p in sorted({*ours.shared, *eager.shared}) if ours.shared.get(p) != eager.shared.get(p)]
        add("sharing", "; ".join(f"{every[j]}/{every[k]}#{k - len(names)}: {ours.shared.get((j, k), 'apart')} for "
                                 f"{eager.shared.get((j, k), 'apart')}" for j, k in pairs))
    elif ours.same != eager.same:
        add("identity", f"{ours.same} for {eager.same}")
    return out


def example(a: Tensor, b: Tensor) -> str:
    differ = ((a != b) & ~((a != a) & (b != b))).flatten()
    if not bool(differ.any()):
        return "signs of zeros"
    at = int(differ.to(torch.uint8).argmax())
    return f"{int(differ.sum())} of {differ.numel()}, e.g. {a.flatten()[at].item()!r} for {b.flatten()[at].item()!r}"


# ---- programs --------------------------------------------------------------------------------------------


def exactness(program: Program, sizes: Mapping[str, int]) -> dict[str, bool]:
    try:
        t = tracked(program, sizes)
    except Exception:
        return {}
    return {n: t.is_exact(n) for n in t.env}


def compiled(program: Program, target: str, backend: Backend = "flambeau") -> Callable[..., Any]:
    if target == "device" and backend == "eager":
        return program.function()
    options: dict[str, Any] = {}
    if backend == "flambeau":
        options = {"options": {"numerics": program.numerics, **({"target": target} if target not in (
            "cpu", "device") else {})}}
    return torch.compile(program.function(), backend=backend, dynamic=True if program.dynamic else None, **options)


def judge(program: Program, target: str, backend: Backend = "flambeau") -> list[Finding]:
    """The differences from eager in the first call that has any. A kernel that does not build counts as one."""
    torch._dynamo.reset()
    function = compiled(program, target, backend)
    device = DEVICE if target == "device" else "cpu"
    plain = program.function()
    out: list[Finding] = []
    for number, sizes in enumerate(program.sizes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager = call(program, plain, sizes)
            exact = exactness(program, sizes) if eager.error is None else {}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ours = call(program, function, sizes, device)
        reference = Reference(program, sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Only the CPU target promises the CPU's bits: the device has its own mathematical functions.
            judged = replace(program, numerics="fast") if target == "device" else program
            out += differences(judged, number, eager, ours, exact, reference)
        texts = [str(w.message) for w in told]
        out += [Finding("warning", t[:500], number) for t in texts if t.startswith("flambeau:")]
        if out:
            break
    return out


# Backends without our kernels: a difference that appears with them too is torch's own. On the device, strides come from
# torch's metadata.
TORCH: dict[str, tuple[Backend, ...]] = {"device": ("aot_eager", by_metadata)}
AOT: tuple[Backend, ...] = ("aot_eager",)


def same_way(f: Finding) -> tuple[str, str]:
    """The key by which findings of two backends are equal: the kind, and the value or error concerned; for strides the
    whole detail."""
    whole = "strides" in f.kind or f.kind == "layout of nothing"
    return f.kind, f.detail if whole else f.detail.split(" ")[0].rstrip(":")


def backend_of(program: Program, target: str) -> str:
    """The backend for a program. On the device, one program in three is compiled, as are those written by hand, which
    have no seed; the others run in eager mode."""
    return "eager" if target == "device" and program.seed % 3 and program.seed >= 0 else "flambeau"


def traced(program: Program, target: str) -> list[Finding]:
    """The findings with torch's own tracing only; empty if the program is not compiled."""
    return judge(program, "cpu", "aot_eager") if backend_of(program, target) == "flambeau" else []


def findings(program: Program, target: str) -> tuple[list[Finding], list[Finding]]:
    """Judges a program. Returns our own findings, and those that torch's own tracing has too."""
    backend = backend_of(program, target)
    ours = judge(program, target, backend)
    theirs: list[Finding] = []
    for other in TORCH.get(target, AOT) if backend == "flambeau" else (by_metadata,):
        if not ours:
            break
        # Our backend sets this too: torch 2.11 would make gradients contiguous, newer versions like the results.
        with torch._functorch.config.patch(guess_tangent_strides_as_outputs=True):
            known = {same_way(f) for f in judge(program, "cpu", other)}
        # If torch's own kernels cannot run the traced program, eager is no reference for it.
        lost = any(kind == "raises" for kind, _ in known)
        theirs += [f for f in ours if lost or same_way(f) in known]
        ours = [f for f in ours if not lost and same_way(f) not in known]
    return sorted(ours, key=lambda f: KINDS.index(f.kind)), theirs
