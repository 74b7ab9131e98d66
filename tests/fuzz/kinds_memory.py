"""Lines that move values: views, copies, writes in place, reads and writes at indices."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Draw, kind
from .program import FLOATS


def one_index(d: Draw, x: str, t: Tensor, ints: bool = True) -> str:
    """The text of a subscript: slices with steps, numbers, new dimensions, an ellipsis."""
    parts = []
    for k in range(d.r.randint(1, max(1, t.dim()))):
        c = d.r.random()
        if c < 0.2:
            parts.append(":")
        elif c < 0.35 and ints and t.shape[k]:
            parts.append(str(d.r.randint(-t.shape[k], t.shape[k] - 1)))
        else:
            start = d.bound(x, t, k) if d.r.random() < 0.6 else ""
            stop = d.bound(x, t, k) if d.r.random() < 0.5 else ""
            step = d.r.choice(("", "", ":2", ":3"))
            parts.append(f"{start}:{stop}{step}")
    if d.r.random() < 0.1:
        parts.insert(d.r.randint(0, len(parts)), "None")
    if d.r.random() < 0.15:
        parts.insert(d.r.randint(0, len(parts)), "...")
    return ", ".join(parts)


def view(d: Draw, x: str, t: Tensor) -> str:
    """An expression that is a view of x in eager."""
    if not t.dim():
        return d.r.choice((f"{x}.unsqueeze(0)", f"{x}.expand(3)", f"{x}.view(1, 1)"))
    a, b = d.dim(t), d.dim(t)
    n = t.shape[a]
    pick = d.r.randrange(24)
    if pick < 4:
        return f"{x}[{one_index(d, x, t)}]"
    if pick == 4:
        return f"{x}.transpose({a}, {b})"
    if pick == 5:
        return f"{x}.permute({', '.join(map(str, d.r.sample(range(t.dim()), t.dim())))})"
    if pick == 6:
        return f"{x}.unsqueeze({b})"
    if pick == 7:
        k = a % t.dim()
        return f"{x}.unsqueeze({k}).expand({', '.join(['-1'] * k + ['3'] + ['-1'] * (t.dim() - k))})"
    if pick == 8 and n:
        w = d.r.randint(1, min(3, n))
        return f"{x}.unfold({a}, {w}, {d.r.randint(1, 2)})"
    if pick == 9 and t.numel():
        return as_strided(d, x, t)
    if pick == 10 and t.dim() > 1:
        e = d.r.choice([k for k in range(t.dim()) if k != a % t.dim()])
        return f"{x}.diagonal({d.r.randint(-1, 1)}, {a}, {e})"
    if pick == 11:
        return f"{x}.{d.r.choice(('view', 'reshape'))}({', '.join(regroup(d, x, t))})"
    if pick == 12:
        return f"{x}.squeeze({d.r.choice(('', str(a)))})"
    if pick == 13 and n:
        return f"{x}.select({a}, {d.r.randint(-n, n - 1)})"
    if pick == 14:
        length = d.r.choice((str(d.r.randint(0, n)), d.bound(x, t, a % t.dim())))
        return f"{x}.narrow({a}, {0 if not n else d.r.randrange(n)}, {length})"
    if pick == 15:
        return f"{x}.movedim({a}, {b})"
    if pick == 16 and n:
        return f"{x}.split({d.r.randint(1, n)}, {a})[{d.r.choice((0, -1))}]"
    if pick == 17 and n:
        return f"{x}.chunk({d.r.randint(1, 3)}, {a})[{d.r.choice((0, -1))}]"
    if pick == 18 and n:
        return f"{x}.unbind({a})[{d.r.choice((0, -1))}]"
    if pick == 19:
        return f"{x}.flatten({min(a % t.dim(), b % t.dim())}, {max(a % t.dim(), b % t.dim())})"
    if pick == 20:
        return f"{x}.tensor_split({d.r.randint(1, 3)}, {a})[{d.r.choice((0, -1))}]"
    if pick == 21 and t.dim() > 1:
        return f"{x}.mT"
    if pick == 22:
        return f"{x}.{d.r.choice(('detach()', 'view_as(' + x + ')', 'expand_as(' + x + ')'))}"
    return f"{x}.view({', '.join(['-1'] if d.r.random() < 0.3 else regroup(d, x, t))})"


def regroup(d: Draw, x: str, t: Tensor) -> list[str]:
    """Another shape with the same number of elements."""
    if d.dynamic and d.r.random() < 0.7:
        k = d.r.randint(0, t.dim())
        sizes = [f"{x}.shape[{j}]" for j in range(t.dim())]
        return d.r.choice((["-1"], [*sizes[:k], "-1"], ["1", *sizes], [*sizes, "1"], ["-1", *sizes[k:]]))
    n, out = t.numel(), []
    if not n:
        return [str(s) for s in t.shape]
    while n > 1 and len(out) < 3:
        f = d.r.choice([k for k in range(1, n + 1) if n % k == 0])
        out.append(str(f))
        n //= f
    return [*out, str(n)] if n > 1 or not out else out


def as_strided(d: Draw, x: str, t: Tensor) -> str:
    room = t.untyped_storage().nbytes() // t.element_size()
    sizes, strides = [], []
    left = room - 1
    for _ in range(d.r.randint(1, 3)):
        size = d.r.randint(1, 4)
        most = left // (size - 1) if size > 1 else 5
        stride = d.r.randint(0, max(0, min(most, 7)))
        if d.r.random() < 0.5 and strides:
            stride = min(most, d.r.choice(strides))
        left -= stride * (size - 1)
        sizes.append(size)
        strides.append(stride)
    offset = "" if d.r.random() < 0.5 else f", {d.r.randint(0, max(0, min(left, 5)))}"
    return f"{x}.as_strided({tuple(sizes)}, {tuple(strides)}{offset})"


@kind(14, "move")
def views(d: Draw, x: str, t: Tensor) -> str | None:
    return view(d, x, t)


@kind(1, "move")
def as_strided_alone(d: Draw, x: str, t: Tensor) -> str | None:
    return as_strided(d, x, t) if t.numel() else None


@kind(0.5, "move", "exact")
def view_dtype(d: Draw, x: str, t: Tensor) -> str | None:
    # Only programs without rounding reinterpret bits, because bits have no reference in double precision.
    if not d.only_exact:
        return None
    wanted = {8: (torch.int64, torch.int32, torch.uint8), 4: (torch.int32, torch.uint8, torch.int64),
              2: (torch.int16, torch.uint8), 1: (torch.uint8, torch.int32, torch.int16)}[t.element_size()]
    return f"{x}.view({d.r.choice(wanted)})"


@kind(8, "move")
def copies(d: Draw, x: str, t: Tensor) -> str | None:
    rank = t.dim()
    format_ = d.r.choice(("torch.contiguous_format", "torch.preserve_format", "torch.channels_last"))
    if not rank:
        return d.r.choice((f"{x}.repeat(3)", f"{x}.clone()", f"torch.stack(({x}, {x}))"))
    a, b = d.dim(t), d.dim(t)
    other = d.other(lambda v: v.dim() == rank and all(
        m == n for k, (m, n) in enumerate(zip(v.shape, t.shape, strict=True)) if k != a % rank)) or x
    same = d.other(lambda v: v.shape == t.shape) or x
    reps = [str(d.r.choice((1, 1, 2, 3))) for _ in range(rank)]
    choice = d.r.randrange(20)
    if choice == 0:
        return f"{x}.repeat({', '.join((['2'] if d.r.random() < 0.2 else []) + reps)})"
    if choice == 1:
        return f"{x}.flip({a})" if d.r.random() < 0.6 else f"{x}.flip({tuple(range(rank))})"
    if choice == 2:
        return f"{x}.roll({d.r.randint(-4, 4)}, {a})" if d.r.random() < 0.7 else f"{x}.roll({d.r.randint(-4, 4)})"
    if choice == 3 and rank > 1:
        e = d.r.choice([k for k in range(rank) if k != a % rank])
        return f"{x}.rot90({d.r.randint(-1, 3)}, ({a}, {e}))"
    if choice in (4, 5):
        return f"torch.cat(({x}, {other}), {a})" if d.r.random() < 0.7 else f"torch.cat(({other}, {x}, {x}), {a})"
    if choice == 6:
        return f"torch.stack(({x}, {same}), {b})"
    if choice == 7:
        return f"F.pad({x}, ({', '.join(str(d.r.randint(-1, 3)) for _ in range(2 * d.r.randint(1, min(2, rank))))}))"
    if choice == 8 and rank > 1:
        mode = d.r.choice(("reflect", "replicate", "circular"))
        return f"F.pad({x}, (1, {d.r.randint(0, 2)}), mode={mode!r})"
    if choice in (9, 10):
        return f"{x}.{d.r.choice(('clone', 'contiguous'))}({'memory_format=' + format_ if d.r.random() < 0.6 else ''})"
    if choice == 11:
        return f"{x}.repeat_interleave({d.r.randint(1, 3)}, {a})"
    if choice == 12 and rank > 1:
        return f"{x}.{d.r.choice(('tril', 'triu'))}({d.r.randint(-1, 1)})"
    if choice == 13 and t.shape[a]:
        k = d.r.randrange(t.shape[a])
        part = d.r.choice((f"{same}.select({a}, {k})", f"{x}.select({a}, 0)"))
        return f"{x}.select_scatter({part}, {a}, {k})"
    if choice == 14:
        start, step = d.r.randint(0, 2), d.r.choice((1, 2))
        index = ":, " * (a % rank) + f"{start}::{step}"
        return f"{x}.slice_scatter({same}[{index}], {a}, {start}, None, {step})"
    if choice == 15 and rank > 1:
        return f"{x}.diagonal_scatter({same}.diagonal(0, 0, 1), 0, 0, 1)"
    if choice == 16:
        return f"torch.{d.r.choice(('zeros_like', 'ones_like', 'empty_like'))}({x}).fill_({d.number_of(t)})"
    if choice == 17:
        return f"{x}.to(memory_format={format_})"
    if choice == 18 and rank > 1:
        return f"{x}.{d.r.choice(('fliplr', 'flipud'))}()"
    return f"{x}.tile({', '.join(reps)})"


@kind(1.5, "move")
def rearranged(d: Draw, x: str, t: Tensor) -> str | None:
    if t.dim() < 3 or not t.numel():
        return None
    # For empty tensors, eager's kernel and torch's metadata disagree.
    apart = f"F.pixel_unshuffle({x}, 2) if {x}.numel() else {x}.clone()"
    return d.r.choice((f"F.pixel_shuffle({x}, 2)", apart, f"F.unfold({x}, 2)",
                       f"torch.channel_shuffle({x}, 2)", f"{x}.unflatten(-1, (-1, 1))",
                       f"F.interpolate({x}, scale_factor=2)", f"F.pad({x}, (1, 1, 1, 1), mode='reflect')"))


# ---- writes ----------------------------------------------------------------------------------------------


def place(d: Draw, x: str, t: Tensor) -> tuple[str, Tensor] | None:
    """An expression for a part of x to write to, and that part as a tensor."""
    if d.r.random() < 0.35:
        return x, t
    text = view(d, x, t)
    try:
        value = eval(text, {x: t.detach(), "torch": torch, **d.trackers[0].env})
    except Exception:
        return None
    return text, value


@kind(7, "move", writes=True)
def writes(d: Draw, x: str, t: Tensor) -> str | None:
    found = place(d, x, t)
    if found is None:
        return None
    text, v = found
    number = d.number_of(t)
    source = d.broadcastable(v)
    choice = d.r.randrange(10)
    if choice == 0:
        return f"{text}.fill_({number})"
    if choice == 1:
        return f"{text}.zero_()"
    if choice in (2, 3) and source and same_kind(d.values[source], t):
        return f"{text}.copy_({source})"
    if choice == 4 and t.dim() > 1:
        return f"{x}.fill_diagonal_({number}{d.r.choice(('', ', wrap=True'))})"
    if choice in (5, 6) and t.dim():
        right = number if d.r.random() < 0.6 or source is None or not same_kind(d.values[source], t) else source
        return f"{x}[{one_index(d, x, t)}] = {right}"
    if choice == 7:
        mask = d.other(lambda m: m.dtype == torch.bool and m.dim() <= v.dim())
        return f"{text}.masked_fill_({mask}, {number})" if mask else None
    if choice == 8 and t.dim():
        return f"{x}.{d.r.choice(('unsqueeze_(0)', 'squeeze_()', 'transpose_(0, -1)', 't_()'))}"
    return f"{text}.neg_()" if t.dtype not in (torch.bool, torch.uint8) else f"{text}.logical_not_()"


def same_kind(a: Tensor, b: Tensor) -> bool:
    """Whether a copy from a to b keeps all values."""
    return a.dtype == b.dtype or (b.dtype in FLOATS[:2] and a.dtype in (torch.bool, torch.uint8)) or (
        b.dtype in (torch.int64, torch.int32) and a.dtype in (torch.bool, torch.uint8, torch.int32))


@kind(5, "round", writes=True)
def updates(d: Draw, x: str, t: Tensor) -> str | None:
    found = place(d, x, t)
    if found is None:
        return None
    text, v = found
    source = d.broadcastable(v)
    right = d.scalar() if source is None or d.r.random() < 0.4 else source
    if right == source and d.values[right].dtype not in (*FLOATS, torch.bool) and t.dtype == torch.bool:
        return None
    if d.r.random() < 0.1 and t.dtype in FLOATS:
        return f"{text}.{d.r.choice(('sin_', 'tanh_', 'sigmoid_', 'exp_'))}()"
    return f"{text}.{d.r.choice(('add_', 'sub_', 'mul_', 'add_'))}({right})"


@kind(3, "move")
def gathers(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim():
        return None
    a = d.r.randrange(t.dim())
    n = d.size(x, t, a) if not d.dynamic else None
    if n is None:  # an input cannot depend on a value's size, so only numbers that are valid at all sizes
        n = str(min((tr.env[x].shape[a] for tr in d.trackers if x in tr.env), default=0))
    if n == "0":
        return None
    k = str(d.r.choice((0, 1, 2, 3, 5)))
    choice = d.r.randrange(9)
    front = ":, " * a
    if choice == 0:
        return f"{x}.index_select({a}, {d.index([k], n)})"
    if choice == 1:
        return f"{x}[{front}{d.index([k], n)}]"
    if choice == 2:
        return f"{x}[{front}{d.index([k, '2'], n)}]"
    if choice == 3 and t.dim() > 1:
        b = d.r.choice([j for j in range(t.dim()) if j != a])
        m = min(tr.env[x].shape[b] for tr in d.trackers)
        if not m:
            return None
        parts = [":"] * t.dim()
        parts[a], parts[b] = d.index([k], n), d.index([d.r.choice((k, "1"))], str(m))
        return f"{x}[{', '.join(parts[:max(a, b) + 1])}]"
    if choice == 4 and t.numel() and not d.dynamic:
        shape = [str(d.r.randint(0 if d.r.random() < 0.2 else 1, s) if s else 0) for s in t.shape]
        shape[a] = k
        return f"{x}.gather({a}, {d.index(shape, n)})"
    if choice == 5 and not d.dynamic and t.numel():
        return f"{x}.take({d.index([k, '2'], str(t.numel()))})"
    if choice == 6 and t.dim() > 1:
        last = max(1, min(tr.env[x].shape[-1] for tr in d.trackers))
        return f"{x}[{d.index([k], n)}, ..., 0]" if a == 0 else f"{x}[..., {d.index([k], str(last))}]"
    if choice == 7:
        mask = d.other(lambda m: m.dtype == torch.bool and m.shape == t.shape)
        return f"{x}[{mask}]" if mask and d.r.random() < 0.3 else None
    if choice == 8 and t.dim() > 1 and t.numel() and not d.dynamic:
        return f"torch.take_along_dim({x}, {d.index([str(s) for s in t.shape], n)}, {a})"
    return None


def _spot(d: Draw, x: str, t: Tensor) -> tuple[int, str, str, str] | None:
    """Draws a dimension and distinct indices into it. Returns also their number and the part of x they select."""
    if not t.dim() or any(tr.env[x].dim() != t.dim() for tr in d.trackers):
        return None
    a = d.r.randrange(t.dim())
    n = min(tr.env[x].shape[a] for tr in d.trackers)
    if not n:
        return None
    k = str(d.r.randint(0, n))
    return a, k, str(n), ":, " * a


@kind(2.5, "move", writes=True)
def indexed_writes(d: Draw, x: str, t: Tensor) -> str | None:
    spot = _spot(d, x, t)
    if spot is None:
        return None
    a, k, n, front = spot
    number = d.number_of(t)
    choice = d.r.randrange(6)
    if choice == 0:
        return f"{x}.index_fill_({a}, {d.index([k], n)}, {number})"
    if choice == 1:
        return f"{x}[{front}{d.index([k], n)}] = {number}"
    if choice == 2:
        return f"{x}.index_copy_({a}, {d.index([k], n, True)}, {x}.narrow({a}, 0, {k}).clone())"
    if choice == 3 and not d.dynamic:
        shape = [str(s) for s in t.shape]
        shape[a] = k
        return f"{x}.scatter_({a}, {d.index(shape, n)}, {number})"
    if choice == 4:
        mask = d.other(lambda m: m.dtype == torch.bool and m.dim() == 1 and m.shape[0] == t.shape[a])
        mask = mask or d.other(lambda m: m.dtype == torch.bool and m.shape == t.shape)
        if mask is None:
            return None
        whole = d.values[mask].shape == t.shape
        return f"{x}[{'' if whole else front}{mask}] = {number}"
    value = f"torch.tensor({number}, dtype={t.dtype})"
    return f"{x}.index_put_(({d.index([k], n)},), {value})" if a == 0 else None


@kind(2.5, "round", writes=True)
def indexed_updates(d: Draw, x: str, t: Tensor) -> str | None:
    spot = _spot(d, x, t)
    if spot is None or t.dtype == torch.bool:
        return None
    a, k, n, front = spot
    source = f"{x}.narrow({a}, 0, {k}).clone()"
    choice = d.r.randrange(5)
    if choice == 0:
        return f"{x}.index_add_({a}, {d.index([k], n)}, {source})"
    if choice == 1 and not d.dynamic:
        shape = [str(s) for s in t.shape]
        shape[a] = k
        return f"{x}.scatter_add_({a}, {d.index(shape, n)}, {source})"
    if choice == 2 and a == 0:
        return f"{x}.index_put_(({d.index([k], n)},), {source}, accumulate=True)"
    if choice == 3 and not d.dynamic:
        shape = [str(s) for s in t.shape]
        shape[a] = k
        mode = d.r.choice(("sum", "amax", "amin") if t.dtype not in FLOATS or not d.grad else ("sum",))
        return f"{x}.scatter_reduce_({a}, {d.index(shape, n)}, {source}, {mode!r})"
    return f"{x}.index_put_(({d.index([k], n)},), torch.tensor({d.number_of(t)}, dtype={t.dtype}), accumulate=True)"


@kind(1, "move")
def functional_writes(d: Draw, x: str, t: Tensor) -> str | None:
    spot = _spot(d, x, t)
    if spot is None:
        return None
    a, k, n, _ = spot
    number = d.number_of(t)
    choice = d.r.randrange(5)
    if choice == 0:
        return f"{x}.index_fill({a}, {d.index([k], n)}, {number})"
    if choice == 1:
        return f"{x}.index_copy({a}, {d.index([k], n, True)}, {x}.narrow({a}, 0, {k}).flip({a}))"
    if choice == 2 and a == 0:
        return f"{x}.index_put(({d.index([k], n)},), torch.tensor({number}, dtype={t.dtype}))"
    mask = d.other(lambda m: m.dtype == torch.bool and m.dim() <= t.dim())
    if choice == 3 and mask:
        return f"{x}.masked_fill({mask}, {number})"
    same = d.broadcastable(t)
    return f"torch.where({mask}, {x}, {same})" if mask and same and d.values[same].dtype == t.dtype else None
