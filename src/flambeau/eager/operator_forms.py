"""The eager operators that can be replaced, by group, and the forms in which each is called.

A group is what a target knows: `Target.wins` says from how many elements its kernels of a group beat those of
torch. Which operators are in one, their lowerings say (`@lower(..., group=...)`); how out= and in-place forms come from
the functional one is read off their schemas, in `forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from flambeau.errors import OptionError
from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import described, facts, name_of, overloads_named
from flambeau.torch_compat.ops import OpOverload

# Arguments that say where a tensor lies: such operators allocate, and call others to fill what they allocated.
PLACES = {"device", "layout", "memory_format", "pin_memory", "names"}


# Operators for which one size tells whether a kernel of ours is the better one: the arguments whose largest decides
# (none: all of them), and what torch's own kernels leave on the table.
GROUPS: dict[str, tuple[str, ...]] = {
    "cumulative": (),  # each line on its own, one element after another: across rows every element is a new cache line
    "max pooling": (),  # windows one by one, without vectors in the usual layout
    "average pooling": (),  # windows one by one, without vectors in the usual layout
    "adaptive pooling": (),  # the bounds of every window by division
    "unpooling": (),  # zeros first, then single writes
    "resizing": (),  # one output after another, by indices and weights
    "grid sampling": (),  # gradients by atomic additions where threads are many
    "volume sampling": (),  # eight corners in scalar code; gradients by atomic additions where threads are many
    "embedding gradient": ("indices",),  # row after row
    "embedding bags": ("indices",),  # maxima element by element
    "embedding bag gradients": ("indices",),  # indices are sorted and counted in passes of their own
    "writes by row": ("source", "values"),  # rows one after another, or atomic additions
    "writes by element": ("index",),  # elements one after another, or atomic additions
    "reads by element": ("index",),  # an address for each element
    "softmax": (),  # rows in several passes, columns in strided reads
    "layer norm": (),  # statistics and result in passes of their own
    "dropout": (),  # mask and product take longer than their bytes
    "draws": (),  # one number after another from a sequential generator
    "statistics": (),  # moments in double precision and places of extrema one by one; logsumexp as five operators
    "extrema": (),  # those of a dimension one by one, with their places
    "activations": (),  # slower exponentials and logarithms
    "light activations": (),  # nothing: bound by memory, as ours are
}


@dataclass(frozen=True)
class OperatorForm:
    """One operator as it is called: it returns its results, or writes them into arguments."""

    op: OpOverload
    functional: Callable[..., Any]  # what it computes; mostly an operator itself
    group: str
    written: tuple[int, ...]  # positions of the arguments that take the results, in their order
    factory: bool = False  # dtype and device of what it writes to are arguments of the functional form

    @property
    def name(self) -> str:
        """As torch.ops has it, the overload left out if it is the default."""
        return str(self.op).removesuffix(".default")

    @property
    def operator(self) -> str:
        assert isinstance(self.functional, OpOverload)
        return base(self.functional)

    @property
    def inputs(self) -> list[int]:
        """Positions of the functional form's arguments among those of this one."""
        return [k for k, a in enumerate(self.op._schema.arguments) if not a.is_out]

    def measured(self) -> int:
        """The arguments whose size counts, as bits."""
        names = GROUPS[self.group]
        arguments = self.op._schema.arguments
        chosen = [k for k, a in enumerate(arguments) if a.name in names]
        return sum(1 << k for k in chosen or range(len(arguments)))


def base(op: OpOverload) -> str:
    return op._schema.name.partition("::")[2]


@cache
def all_forms() -> tuple[OperatorForm, ...]:
    """Every form of every operator of the groups that has a lowering."""
    ops_loaded()
    named = {op if isinstance(op, str) else name_of(op): group for op, group in described("group") if group}
    found = (form for name, group in named.items() for form in forms(name, LOWERINGS, group))
    # What torch generated calls another form of the operator, which may be ours already.
    return tuple(form for form in found if torch.Tag.generated not in form.op.tags)


def forms(operator: str, functional: Container[OpOverload], group: str = "") -> Iterator[OperatorForm]:
    """The forms of an operator that compute what one of its functional forms does."""
    own = overloads_named((operator,))
    takes = {_given(op): op for op in own if op in functional}
    for op in (*own, *overloads_named(facts(own[0]).in_place if own else ())):
        found = op if op in functional else takes.get(_given(op))
        if found is None:
            continue
        written = tuple(k for k, a in enumerate(op._schema.arguments) if a.is_write)
        # Of several arguments, the schema says in which order they take results only if they are for nothing else.
        plain = len(written) == 1 or all(op._schema.arguments[k].is_out for k in written)
        if not written or plain and len(written) == len(found._schema.returns):
            yield OperatorForm(op, found, group, written, any(a.name == "dtype" for a in found._schema.arguments)
                       and not any(a.name == "dtype" for a in op._schema.arguments))


def _given(op: OpOverload) -> tuple[tuple[str, str], ...]:
    """The arguments that form and functional form share."""
    places = any(a.name in PLACES for a in op._schema.arguments)
    return tuple((a.name, str(a.type)) for a in op._schema.arguments
                 if not a.is_out and a.name not in PLACES and not (places and a.name == "dtype"))


def wanted(wins: Mapping[str, int], only: Any, exclude: Any, default: int) -> dict[OperatorForm, int]:
    """The forms to replace, with the number of elements from which: those of `wins`, or what `only` names."""
    chosen, left = names(only), names(exclude)
    thresholds = wins if chosen is None else {name: wins.get(name, default) for name in GROUPS}
    left = left or set()
    return {form: thresholds[form.group] for form in all_forms()
            if form.group in thresholds and not {form.group, form.operator} & left
            and (chosen is None or {form.group, form.operator} & chosen)}


def names(given: str | Iterable[str] | None) -> set[str] | None:
    """Groups and operators, as the user may write them: "cumsum", "aten.cumsum", "aten::cumsum_"."""
    if given is None:
        return None
    asked = {given} if isinstance(given, str) else set(given)
    operators = {form.operator for form in all_forms()}
    found = {name: _known(name, operators) for name in asked}
    if unknown := sorted(name for name, known in found.items() if known is None):
        raise OptionError(f"no operator that can be replaced is called {', '.join(unknown)}",
                          hint=f"the groups are {', '.join(GROUPS)}; flambeau.accelerated() lists operators")
    return {known for known in found.values() if known is not None}


def _known(name: str, operators: set[str]) -> str | None:
    if name in GROUPS:
        return name
    short = name.removeprefix("aten.").rpartition("::")[2].partition(".")[0]
    return next((x for x in (short, short.removesuffix("_")) if x in operators), None)


def cpp_names(forms: Sequence[OperatorForm]) -> tuple[list[str], list[str]]:
    """(headers, types) of ATen in which C++ finds the signatures. Of operators of other libraries it knows none."""
    forms = [form for form in forms if form.op.namespace == "aten"]
    headers = sorted({f"ATen/ops/{form.operator}_ops.h" for form in forms})
    types = [f"at::_ops::{base(form.op)}" + ("" if form.op._overloadname == "default" else f"_{form.op._overloadname}")
             for form in forms]
    return headers, types
