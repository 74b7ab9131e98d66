"""Finds the first operator at which a compiled graph differs from eager, by bisection of the ATen graph.

The graph is compiled again with some of its nodes as further results, run on its recorded inputs, and compared at these
nodes with ATen, which runs the same graph operator by operator. A step of the search takes the values that are live at
a cut in the middle, and asks:

- one of them differs: the search continues before that one;
- none does, and the result still differs: the search continues after the cut;
- none does, and now the result is equal too: a value was used as it was computed, not as it would have been stored.
  So fusion causes the difference, and the value is searched for among those at the cut.

So the operator found has a differing result although all its inputs, put into memory, are equal. It is also known
whether putting them into memory removes the difference.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from flambeau.capture.storage import view_root
from flambeau.ops.facts import facts

from .differences import Difference, difference
from .recorded_calls import Call

aten = torch.ops.aten
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)')
TORCH = str(Path(torch.__file__).parent)
NEAR = 12  # readers that are tried one by one, of a value that fusion used unrounded


@dataclass
class First:
    """The place where a difference appears first, and why."""

    operator: str  # aten.mul.Tensor
    kind: str  # operator: from equal inputs; fusion: only together with others; capture: before anything is compiled
    direction: str  # forward or backward
    graph: int = 0  # its number, in the order of calls
    node: str = ""
    difference: Difference | None = None
    unrounded: list[str] = field(default_factory=list)  # fusion: values that make it vanish once they are in memory
    fused: list[str] = field(default_factory=list)  # the operators that share its kernel
    layer: str = ""  # the module that called it
    file: str = ""
    line: int = 0
    code: str = ""
    probes: int = 0  # how many times the graph was compiled for the search

    def __str__(self) -> str:
        return f"{self.operator} ({self.direction}){self.where()}: {self.why()}"

    def where(self) -> str:
        layer = f" in layer {self.layer}" if self.layer else ""
        return layer + (f" at {self.file}:{self.line}" if self.file else "") + (f" `{self.code}`" if self.code else "")

    def why(self) -> str:
        if self.kind == "capture":
            return "the captured graph has other operators in its place, which give other values"
        if self.kind == "fusion":
            stored = ", ".join(self.unrounded)
            return f"it differs only inside a fused kernel, and not if {stored} is stored in memory first"
        return "its result differs, although everything that it reads is equal"


def first_of_call(call: Call, number: int = 1) -> First | None:
    """The first operator of a call whose result differs from ATen's; None if all results are equal."""
    eager = call.values()
    wrong = differing_results(call, eager)
    return Search(call, eager).run(wrong[0], number) if wrong else None


def differing_results(call: Call, eager: dict[fx.Node, Any]) -> list[fx.Node]:
    """Nodes that are returned or written into an input, and differ from ATen's; in graph order."""
    pairs = [*zip(call.results(), call.outputs, strict=True), *zip(call.placeholders(), call.after, strict=True)]
    written = {n.args[0]: n.args[1] for n in call.graph.nodes if n.target is aten.copy_.default}
    wrong = {view_root(written.get(n, n)) for n, value in pairs
             if isinstance(n, fx.Node) and isinstance(value, torch.Tensor) and not same(eager[n], value)}
    return [n for n in call.graph.nodes if n in wrong]


class Search:
    def __init__(self, call: Call, eager: dict[fx.Node, Any]) -> None:
        self.call, self.eager = call, eager
        self.order = {n: k for k, n in enumerate(call.graph.nodes)}
        self.probes = 0

    def run(self, last: fx.Node, number: int) -> First:
        low = -1  # everything up to here is equal
        while True:
            before = ancestors(last)
            between = [n for n in before if self.order[n] > low and self.comparable(n)]
            if not between:
                return self.named(last, number, [])
            cut = self.order[between[(len(between) - 1) // 2]]
            living = [n for n in between if self.order[n] <= cut
                      and any(self.order[u] > cut and (u is last or u in before) for u in users(n))]
            found = self.differing([*living, last])
            if found and found[0] is not last:
                last = found[0]
            elif found:
                low = cut
            else:
                return self.fusion(living, last, number)

    def comparable(self, n: fx.Node) -> bool:
        return (n.op == "call_function" and isinstance(self.eager[n], torch.Tensor) and view_root(n) is n
                and not facts(n.target).undefined and n.target is not aten.copy_.default)

    def differing(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes whose values differ from ATen's when the graph returns all of the given nodes."""
        self.probes += 1
        found = self.call.probe(nodes)
        wrong = {n for n in nodes if not same(self.eager[n], found[n])}
        return sorted(wrong, key=self.order.__getitem__)

    def fusion(self, living: Sequence[fx.Node], last: fx.Node, number: int) -> First:
        """Find which values must be in memory for equality, and the node that reads them otherwise."""
        needed = list(living)
        size = (len(needed) + 1) // 2
        while size and len(needed) > 1:  # remove what is not needed, halves first
            for start in range(0, len(needed), size):
                rest = needed[:start] + needed[start + size:]
                if rest and not self.differing([*rest, last]):
                    needed = rest
                    break
            else:
                size //= 2
                continue
            size = min(size, len(needed) // 2)
        after = descendants(needed)
        readers = [n for n in ancestors(last) if n in after and self.comparable(n)]
        for n in readers[:NEAR]:
            if self.differing([n]):
                last = n
                break
        return self.named(last, number, needed)

    def named(self, n: fx.Node, number: int, needed: Sequence[fx.Node]) -> First:
        """The finding for a node, after one more probe: does it still differ with all its inputs in memory?"""
        inputs = [i for i in dict.fromkeys(view_root(i) for i in n.all_input_nodes) if self.comparable(i)]
        if not needed and inputs and not self.differing([*inputs, n]):
            needed = inputs
        found = self.call.probe([n])[n]
        file, line, code = source(n)
        return First(
            operator=called(n), kind="fusion" if needed else "operator",
            direction="backward" if self.call.backward else "forward", graph=number, node=n.name,
            difference=difference(n.name, self.eager[n], found), unrounded=[called(m) for m in needed],
            fused=companions(self.call, n), layer=layer_of(n), file=file, line=line, code=code, probes=self.probes)


# ---- nodes -------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Whether a node has eager's value. Some operators return private results (for their gradient) in another shape
    than in torch's metadata, which we follow: these cannot be compared, and count as equal."""
    shapes = [x.shape for x in (a, b) if isinstance(x, torch.Tensor)]
    return len(set(shapes)) == 2 or difference("", a, b).equal


def users(n: fx.Node) -> Iterable[fx.Node]:
    """The nodes that read a value, directly or through views."""
    for u in n.users:
        if u.op == "call_function" and view_root(u) is not u:
            yield from users(u)
        yield u


def ancestors(n: fx.Node) -> dict[fx.Node, None]:
    """The nodes that a node is computed from, in graph order."""
    found = {n}
    for m in reversed(n.graph.nodes):
        if m in found:
            found.update(m.all_input_nodes)
    return {m: None for m in n.graph.nodes if m in found and m is not n}


def descendants(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from the given ones."""
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        new = [u for u in left.pop().users if u not in found]
        found.update(new)
        left += new
    return found


def called(n: fx.Node) -> str:
    """The operator's name; for one of several results, with its index."""
    if n.target is operator.getitem:
        producer, k = n.args
        return f"{called(producer)}[{k}]"  # type: ignore[arg-type]
    return str(n.target)


def companions(call: Call, n: fx.Node) -> list[str]:
    """The operators that share the node's kernel, if it is one of ours."""
    name = n.all_input_nodes[0].name if n.target is operator.getitem else n.name
    for step in call.compiled.program.steps:
        origins = getattr(step, "origins", ())
        if name in origins:
            by_name = {m.name: m for m in call.graph.nodes}
            return [called(by_name[o]) for o in origins if o in by_name and view_root(by_name[o]) is by_name[o]]
    return []


def source(n: fx.Node) -> tuple[str, int, str]:
    """The line of the user's code: the innermost frame outside of torch."""
    frames = [m for m in FRAME.finditer(n.meta.get("stack_trace") or "") if not of_torch(m["file"])]
    if not frames:
        return "", 0, ""
    return frames[-1]["file"], int(frames[-1]["line"]), frames[-1]["code"].strip()


def of_torch(file: str) -> bool:
    return file.startswith(TORCH)


def layer_of(n: fx.Node) -> str:
    """The path in the model of the innermost module around the node."""
    stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return re.sub(r"^L\['(?:self|fn)'\]\.?|^[GL]\['(\w+)'\]|_modules\b|\['|'\]|\[|\]", lambda m: m[1] or "",
                  paths[-1]).replace("..", ".").strip(".") if paths else ""
