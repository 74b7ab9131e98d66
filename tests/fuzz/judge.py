"""Runs a program in eager and compiled, and says how they differ.

Values that are only moved, chosen or whole have eager's bits. Others may be as far from the float64 result as eager's
are; where eager was luckier than a rounding allows, noise of one rounding per operator, added to the float64 run,
says how far a result may move.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .program import FLOATS, Program, tracked

DEVICE = "flambeau"


@dataclass
class Seen:
    """What a caller sees of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    grad: bool
    value: Tensor


@dataclass
class Call:
    """What a caller sees of one call."""

    error: BaseException | None = None
    results: list[Seen] = field(default_factory=list)
    inputs: list[Seen] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)  # all of the memory behind each input
    gradients: list[Seen | None] = field(default_factory=list)
    shared: dict[tuple[int, int], int] = field(default_factory=dict)  # pairs of tensors: bytes from one to the other
    same: list[int] = field(default_factory=list)  # for each result the first tensor that is the same object


# Kinds of findings, the worst first.
KINDS = ("value", "gradient", "mutation", "bits", "gradient bits", "sharing", "shape", "raises", "no error", "warning",
         "gradients", "error type", "input layout", "input memory", "requires_grad", "identity", "strides", "offset",
         "gradient strides")


@dataclass(frozen=True)
class Finding:
    kind: str
    detail: str
    call: int = 0


def seen(t: Tensor) -> Seen:
    value = t.detach().cpu()
    return Seen(t.dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.requires_grad,
                value.clone(memory_format=torch.contiguous_format))


def storage_of(t: Tensor) -> Tensor:
    flat = t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return flat.cpu().clone()


def call(program: Program, function: Callable[..., Any], sizes: Mapping[str, int], device: str = "cpu",
         is_wide: bool = False) -> Call:
    """One call with fresh arguments, and everything there is to see afterwards."""
    torch.manual_seed(0)
    args = program.call(sizes, device, is_wide)
    tensors = [a for a in args if isinstance(a, Tensor)]
    out = Call()
    try:
        made = list(function(*args))
        out.results = [seen(t) for t in made]
    except Exception as e:
        out.error = e
        return out
    everything = [*tensors, *made]
    out.inputs = [seen(t) for t in tensors]
    out.memory = [storage_of(t) for t in tensors]
    out.same = [next(j for j, o in enumerate(everything) if o is t) for t in made]
    for j, a in enumerate(everything):
        for k in range(max(j + 1, len(tensors)), len(everything)):
            b = everything[k]
            x, y = a.untyped_storage(), b.untyped_storage()
            # Of tensors without elements, nobody sees where they are.
            if a.numel() and b.numel() and x.data_ptr() == y.data_ptr():
                out.shared[j, k] = b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size()
    leaves = [a for a in tensors if a.requires_grad]
    live = list({id(t): t for t in made if t.requires_grad}.values())
    if program.grad and live and leaves:
        try:
            seeds = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape) for t in live]
            gradients = torch.autograd.grad(live, leaves, seeds, allow_unused=True)
            out.gradients = [g if g is None else seen(g) for g in gradients]
        except Exception as e:
            out.error = e
    return out


# ---- the float64 reference and its noise -----------------------------------------------------------------

# Operators that move or choose: no rounding happens in them, and noise would break ties.
_QUIET = {"clone", "copy", "copy_", "_to_copy", "where", "gather", "index", "index_select", "index_put", "index_put_",
          "scatter", "scatter_", "fill", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "sort", "topk",
          "argmax", "argmin", "max", "min", "amax", "amin", "aminmax", "maximum", "minimum", "fmax", "relu", "abs",
          "neg", "neg_", "gt", "lt", "ge", "le", "eq", "ne", "sign", "sgn", "floor", "ceil", "round", "trunc",
          "logical_not", "logical_and", "logical_or", "logical_xor", "any", "all", "isnan", "isclose", "cat", "stack",
          "constant_pad_nd", "flip", "roll", "repeat", "tril", "triu", "masked_fill", "masked_fill_", "index_fill_",
          "index_fill", "cummax", "cummin", "_cummax_helper", "_cummin_helper", "signbit", "heaviside", "clamp",
          "threshold_backward", "max_pool2d_with_indices", "adaptive_max_pool2d", "median", "kthvalue", "detach",
          "take", "bucketize", "slice_scatter", "select_scatter", "diagonal_scatter", "select_backward",
          "slice_backward", "new_zeros", "zeros", "empty", "full", "index_copy_", "index_copy", "scatter_reduce",
          "count_nonzero", "nonzero", "fill_diagonal_", "empty_like", "new_empty_strided", "embedding"}


class Noise(TorchDispatchMode):
    """Each operator that rounds has operands and results that are off by up to `eps`, at random."""

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps = eps
        self.generator = torch.Generator().manual_seed(seed)

    def off(self, t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        sign = torch.randint(0, 2, t.shape, generator=self.generator) * 2 - 1
        return t * (1 + sign * self.eps)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        mutates = any(a.alias_info is not None for a in func._schema.arguments)
        if mutates or func.is_view or name in _QUIET:
            out = func(*args, **(kwargs or {}))
            if name.rstrip("_") != name and name not in _QUIET and isinstance(out, Tensor) and out.is_floating_point():
                with torch.no_grad():
                    try:
                        out.copy_(self.off(out))
                    except RuntimeError:
                        pass
            return out
        out = func(*(self.off(a) if not isinstance(a, list | tuple) else type(a)(map(self.off, a)) for a in args),
                   **(kwargs or {}))
        return type(out)(map(self.off, out)) if isinstance(out, list | tuple) else self.off(out)


@dataclass
class Reference:
    """The float64 run of a program at one of its sizes, made when it is asked for."""

    program: Program
    sizes: Mapping[str, int]
    _run: Call | None = None
    _noise: list[Call] | None = None

    def _call(self, *modes: Any) -> Call:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with ExitStack() as stack:
                for m in modes:
                    stack.enter_context(m)
                function = copying(self.program, self.sizes).function(is_wide=True)
                return call(self.program, function, self.sizes, is_wide=True)
        finally:
            torch.set_default_dtype(before)

    def value(self, group: str, k: int) -> Tensor | None:
        self._run = self._run or self._call()
        return _of(self._run, group, k)

    def noise(self, group: str, k: int) -> Tensor | None:
        """How far the value moves, elementwise, if every operator is off by one rounding."""
        if self._noise is None:
            eps = max((torch.finfo(d).eps for d in _float_dtypes(self.program, self.sizes)), default=2e-16)
            self._noise = [self._call(Noise(eps, s)) for s in range(10)]
        exact = self.value(group, k)
        moved = [_of(c, group, k) for c in self._noise]
        if exact is None or any(m is None or m.shape != exact.shape for m in moved):
            return None
        return torch.stack([(m - exact).abs() for m in moved if m is not None]).amax(0)


def copying(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program with a copy wherever a change of dtype is one: in double precision it would be none."""
    try:
        env = tracked(program, sizes).env
    except Exception:
        return program
    steps = []
    for s in program.steps:
        if s.name in ("casts", "roundings") and s.makes and env[s.makes[0]].untyped_storage()._cdata not in {
                env[n].untyped_storage()._cdata for n in s.reads if isinstance(env[n], Tensor)}:
            s = replace(s, text=f"{s.text}.clone()")
        steps.append(s)
    return replace(program, steps=tuple(steps))


def _float_dtypes(program: Program, sizes: Mapping[str, int]) -> set[torch.dtype]:
    try:
        env = tracked(program, sizes).env
    except Exception:
        return set(FLOATS)
    return {v.dtype for v in env.values() if isinstance(v, Tensor) and v.dtype in FLOATS}


def _of(c: Call, group: str, k: int) -> Tensor | None:
    if c.error is not None:
        return None
    if group == "memory":
        return c.memory[k] if k < len(c.memory) else None
    row = (c.results if group == "result" else c.gradients)[k:k + 1]
    return row[0].value if row and row[0] is not None else None


def bits_differ(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():
        # Zeros of different sign differ, NaNs do not.
        whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
        differ = (a.view(whole) != b.view(whole)) & ~(a.isnan() & b.isnan())
        return bool(differ.any())
    return not torch.equal(a, b)


def too_far(ours: Tensor, eager: Tensor, reference: Reference, group: str, k: int) -> str | None:
    """None where ours is as good as eager's."""
    if not ours.is_floating_point():
        return None if torch.equal(ours, eager) else "whole numbers differ"
    if torch.equal(ours, eager):
        return None
    want = reference.value(group, k)
    if want is None or want.shape != ours.shape:
        return None
    a, b, want = ours.double(), eager.double(), want.double()
    if bool((a.isnan() != b.isnan()).any()):
        return "NaN in one of them"
    eps = torch.finfo(ours.dtype).eps
    off, theirs = (a - want).abs().nan_to_num(0.0), (b - want).abs().nan_to_num(0.0)
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


# ---- comparison ------------------------------------------------------------------------------------------


def differences(program: Program, number: int, eager: Call, ours: Call, exact: Mapping[str, bool],
                reference: Reference) -> list[Finding]:
    """How a call of ours differs from eager's."""
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
        if a.stride != b.stride and a.value.numel():
            add("strides" if group == "result" else "gradient strides", f"{name} {list(a.shape)}: {a.stride} for {b.stride}")
        if a.offset != b.offset and a.value.numel():
            add("offset", f"{name}: {a.offset} for {b.offset}")
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
        texts = [f"{every[j]}/{every[k]}#{k - len(names)}: {ours.shared.get((j, k), 'apart')} for "
                 f"{eager.shared.get((j, k), 'apart')}"
                 for j, k in sorted({*ours.shared, *eager.shared}) if ours.shared.get((j, k)) != eager.shared.get((j, k))]
        add("sharing", "; ".join(texts))
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


def compiled(program: Program, target: str, backend: str = "flambeau") -> Callable[..., Any]:
    if target == "device" and backend == "eager":
        return program.function()
    options: dict[str, Any] = {}
    if backend == "flambeau":
        options = {"options": {"numerics": program.numerics, **({"target": target} if target not in (
            "cpu", "device") else {})}}
    return torch.compile(program.function(), backend=backend, dynamic=True if program.dynamic else None, **options)


def judge(program: Program, target: str, backend: str = "flambeau") -> list[Finding]:
    """The differences from eager, over all calls. A kernel that does not build is one, too."""
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
            out += differences(program, number, eager, ours, exact, reference)
        out += [Finding("warning", str(w.message)[:500], number) for w in told if str(w.message).startswith("flambeau:")]
        if out:
            break
    return out


# What torch itself changes shows with these backends as well.
TORCH = ("aot_eager", "aot_eager_decomp_partition")


def same_way(f: Finding) -> tuple[str, str]:
    """The kind, and the value or the error that it is about."""
    return f.kind, f.detail.split(" ")[0].rstrip(":")


def findings(program: Program, target: str) -> tuple[list[Finding], list[Finding]]:
    """(those of this project, those that torch's own tracing has too)."""
    backend = "eager" if target == "device" and program.seed % 3 else "flambeau"
    ours = judge(program, target, backend)
    theirs: list[Finding] = []
    for other in TORCH if backend == "flambeau" else ():
        if not ours:
            break
        known = {same_way(f) for f in judge(program, "cpu", other)}
        theirs += [f for f in ours if same_way(f) in known]
        ours = [f for f in ours if same_way(f) not in known]
    return sorted(ours, key=lambda f: KINDS.index(f.kind)), theirs
