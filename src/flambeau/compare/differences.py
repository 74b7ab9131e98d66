"""Compares two tensors: how many values differ, by how many ulps, and how far each is from a reference.

A value differs if its bits do; a NaN equals a NaN, whatever its payload. Distances are counted in representable numbers
of the dtype (ulps), for integers in ones, and binned by powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIGN = "sign of zero"
APART = "NaN or infinite"  # one of the two is, and the other is not


@dataclass
class Difference:
    """Two tensors of one shape and dtype. `bins` counts differing values by distance: "1", "2-3", "4-7", ..."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    total: int = 0
    differ: int = 0
    max_ulps: int = 0
    bins: dict[str, int] = field(default_factory=dict)
    rms_eager: float | None = None  # against the float64 reference; None without one
    rms_compiled: float | None = None
    note: str = ""

    @property
    def equal(self) -> bool:
        return self.differ == 0 and not self.note.startswith("!")

    @property
    def ratio(self) -> float | None:
        """The error of the compiled result as a multiple of eager's."""
        if self.rms_eager is None or self.rms_compiled is None:
            return None
        if self.rms_eager == 0.0:
            return 1.0 if self.rms_compiled == 0.0 else math.inf
        return self.rms_compiled / self.rms_eager


def difference(name: str, eager: Any, compiled: Any, reference: Any = None) -> Difference:
    """Compare two values. `reference` is a float64 tensor, or None. Values other than tensors are compared directly."""
    if not isinstance(eager, torch.Tensor) or not isinstance(compiled, torch.Tensor):
        return plain(name, eager, compiled)
    out = Difference(name, str(eager.dtype).removeprefix("torch."), tuple(eager.shape), eager.numel())
    if eager.dtype is not compiled.dtype or eager.shape != compiled.shape:
        out.differ, out.note = out.total or 1, f"! compiled: {compiled.dtype} {list(compiled.shape)}"
        return out
    if eager.layout is not torch.strided or eager.is_quantized:
        out.note = f"not compared: {eager.layout}"
        return out
    a, b = plane(eager), plane(compiled)
    count(out, a, b)
    if reference is not None and a.dtype.is_floating_point:
        wide = plane(reference).to(a.device, torch.float64)
        if wide.shape == a.shape:
            out.rms_eager, out.rms_compiled = rms(a, wide), rms(b, wide)
    return out


def plain(name: str, eager: Any, compiled: Any) -> Difference:
    """Compare two values of which at most one is a tensor."""
    same = type(eager) is type(compiled) and (eager == compiled or (eager != eager and compiled != compiled))
    texts = [f"a tensor {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in (eager, compiled)]
    return Difference(name, type(eager).__name__, (), 1, 0 if same else 1,
                      note="" if same else f"! {texts[0]} in eager, {texts[1]} compiled")


def plane(t: torch.Tensor) -> torch.Tensor:
    """A contiguous real tensor with the same values, detached from autograd."""
    t = t.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(t) if t.is_complex() else t).contiguous()


def count(out: Difference, a: torch.Tensor, b: torch.Tensor) -> None:
    bits = INTEGERS[a.element_size()]
    x, y = (t.reshape(-1).view(bits) for t in (a, b))
    at = (x != y).nonzero().squeeze(1)
    if a.dtype.is_floating_point and at.numel():
        nan = a.reshape(-1)[at].float().isnan() & b.reshape(-1)[at].float().isnan()
        at = at[~nan]
    out.total, out.differ = a.numel(), at.numel()
    if not out.differ:
        return
    x, y = x[at].long(), y[at].long()
    odd = torch.zeros_like(at, dtype=torch.bool)
    if a.dtype.is_floating_point:
        odd = ~(a.reshape(-1)[at].double().isfinite() & b.reshape(-1)[at].double().isfinite())
        x, y = (ordered(t, 8 * a.element_size()) for t in (x, y))
    elif not a.dtype.is_signed:  # bool and uint8 were read as signed
        x, y = (t & (1 << 8 * a.element_size()) - 1 if a.element_size() < 8 else t for t in (x, y))
    distance = (x - y).abs()
    distance[(x < 0) != (y < 0)] = (x.double() - y.double()).abs().clamp(max=2.0**62).long()[(x < 0) != (y < 0)]
    regular = distance[~odd]
    out.max_ulps = int(regular.max()) if regular.numel() else 0
    zeros = int((regular == 0).sum())
    powers = regular[regular > 0].double().log2().floor().long()
    counts = torch.bincount(powers.cpu(), minlength=1).tolist() if powers.numel() else []
    out.bins = {SIGN: zeros, **{label(k): n for k, n in enumerate(counts)}, APART: int(odd.sum())}
    out.bins = {k: n for k, n in out.bins.items() if n}


def label(power: int) -> str:
    low, high = 1 << power, (1 << power + 1) - 1
    return str(low) if low == high else f"{low}-{high}" if power < 14 else f"2^{power}"


def ordered(bits: torch.Tensor, width: int) -> torch.Tensor:
    """Floating-point numbers, given as bits, mapped to integers in the same order; both zeros become 0."""
    low = bits & ((1 << width - 1) - 1) if width < 64 else bits & 0x7FFFFFFFFFFFFFFF
    return torch.where(bits < 0, -low, low)


def rms(t: torch.Tensor, wide: torch.Tensor) -> float:
    """The root mean square error of t; equal NaNs and infinities count as no error."""
    t = t.double()
    off = torch.where((t == wide) | (t.isnan() & wide.isnan()), 0.0, t - wide)
    return float(off.square().mean().sqrt()) if off.numel() else 0.0


def gathered(differences: list[Difference]) -> dict[str, int]:
    """The bins of all differences together, in order of distance."""
    out: dict[str, int] = {}
    for d in differences:
        for name, n in d.bins.items():
            out[name] = out.get(name, 0) + n
    order = [SIGN, *(label(k) for k in range(64)), APART]
    return {name: out[name] for name in order if name in out}
