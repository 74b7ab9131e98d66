"""The gradient of attention in Triton. With p the softmax, g the gradient of the result and

    dp = (g @ value.T) * keep,   given = p * (dp - inner),   ds = slope(product, given)

the gradients are `scale * ds @ key` of queries, `scale * ds.T @ query` of keys, and `(p * keep).T @ g` of values. Two
kernels compute them, each recomputing p: in one a program owns a block of columns and loops over rows, in the other it
owns a block of rows and loops over columns. So every sum has a fixed order, and only the gradients of captured tensors
are accumulated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.attention import Gradient
from flambeau.ir.expr import Expr
from flambeau.ir.index import ONE, Index

from ..blocks import PartDraft
from .attention import AttentionBlocks, Side, Walk


class GradientBlocks(AttentionBlocks):
    """The base of both gradient kernels: computes p and ds for a block of scores."""

    @property
    def gradient(self) -> Gradient:
        assert self.n.gradient is not None
        return self.n.gradient

    def logs(self) -> str:
        """Loads the logarithms of the rows' sums. Where a score itself may hide a whole row, -inf becomes +inf, so that
        p is zero there."""
        text = self.value(self.gradient.logs)
        return text if self.linear() else f'tl.where({text} == float("-inf"), float("inf"), {text})'

    def softmax(self, w: Walk, product: str, logs: str) -> str:
        """Computes p at the points of a block; returns its name."""
        self.scored(product)
        holds, factor, p = self.conditions(w), self.linear(), self.fresh("share")
        exponent = f"{self.spread(self.value(self.n.score), self.full())} - {logs}" if factor is None \
            else f"fl.fma({product}, {factor}, -{logs})"
        self.line(f"{p} = tl.exp2({exponent})")
        if holds:
            self.line(f"{p} = tl.where({holds}, {p}, 0)")
        return p

    def kept(self, text: str) -> str:
        return text if self.n.keep is None else f"{text} * {self.value(self.n.keep)}"

    def slopes(self, w: Walk, p: str, dp: str, inner: str) -> str:
        """Computes ds at the points of a block, in the dtype of factors; returns its name. Gradients of captured
        tensors are added to memory on the way."""
        g, given, ds = self.gradient, self.fresh("given"), self.fresh("ds")
        self.line(f"{given} = {p} * ({self.kept(dp)} - {inner})")
        self.scopes[-1].known[g.given] = given
        for name, at, e in self.captured():
            self.capture(name, at, e, w)
        slope = self.value(g.slope)
        holds = "" if g.slope is g.given else self.conditions(w)
        slope = f"tl.where({holds}, {slope}, 0)" if holds else slope  # a slope may be anything where p is zero
        self.line(f"{ds} = tl.cast({slope}, {self.d.types[self.kind]})")
        return ds

    def captured(self) -> list[tuple[str, Index, Expr]]:
        asked = self.gradient.captured
        places = self.k.stores[len(self.k.stores) - len(asked):]
        return [(name, at, e) for (name, at), e in zip(places, asked, strict=True)]

    def capture(self, name: str, at: Index, e: Expr, w: Walk) -> None:
        """Adds the gradient of a captured tensor to memory, summed first along the axes that its address does not
        depend on."""
        axes, value = self.index_axes(at), self.spread(self.value(e), self.full())
        holds = " & ".join(x for x in (self.conditions(w), self.inside((0,))) if x)
        text = f"tl.where({holds}, {value}, 0)" if holds else value
        for axis in sorted(self.full() - axes):
            text = f"tl.sum({text}, {axis}, keep_dims=True)"
        text = f"tl.cast({text if axes else f'tl.sum({text})'}, {self.d.types[self.dtypes[name]]})"
        if self.is_alone(at):
            self.store(name, at, text, axes, *([f"({holds})"] if holds else []))
            return
        inside = self.inside(axes)
        self.line(f"tl.atomic_add({self.pointer(name, at, axes)}, {text}{f', {inside}' if inside else ''}, "
                  'sem="relaxed")')

    def is_alone(self, at: Index) -> bool:
        """Whether no two points write the same element, so that a plain store replaces the atomic addition."""
        n = self.n
        every = [v for v in (*n.batch, n.group, n.row, n.column) if v.size is not ONE]
        steps = sorted(((at.coefficient(v), v) for v in every), key=lambda x: x[0].const if x[0] else 0)
        reach = 1
        for step, v in steps:
            if step is None or not step.is_const or not v.size.is_const or step.const < reach:
                return False
            reach += step.const * (v.size.const - 1)
        return True


class QueriesBlocks(GradientBlocks):
    """The kernel for the gradient of the queries: a program owns a block of rows."""

    def render(self) -> PartDraft:
        n, t, g = self.n, self.t, self.gradient
        grid = self.open(*n.batch, n.group)
        rows = Side(n.row, "first", t.high, 0 in self.masks)
        queries = self.factor(n.query, rows, n.depth, self.deep)
        results = self.factor(g.result, rows, n.width, self.broad)
        logs, inner = self.logs(), self.value(g.inner)
        sums = [self.zeros(f"sums{i}", t.high, p.length) for i, p in enumerate(self.deep)]
        for w in self.walks():
            with self.walk(w) as columns:
                keys = self.factor(n.key, columns, n.depth, self.deep)
                p = self.softmax(w, self.dot(queries, transposed(keys)), logs)
                values = self.factor(n.value, columns, n.width, self.broad)
                ds = self.slopes(w, p, self.dot(results, transposed(values)), inner)
                for name, key in zip(sums, keys, strict=True):
                    self.line(f"{name} = {self.dot([ds], [key], name)}")
        scale, (name, at) = self.value(g.scale), self.k.stores[0]
        self.written(name, at, [f"{x} * {scale}" for x in sums], rows, n.depth, self.deep)
        return self.draft(grid)


class KeysBlocks(GradientBlocks):
    """The kernel for the gradients of keys and values: a program owns a block of columns."""

    def render(self) -> PartDraft:
        n, t = self.n, self.t
        grid = self.open(*n.batch)
        columns = Side(n.column, "first", t.wide, 0 in self.masks)
        keys = self.factor(n.key, columns, n.depth, self.deep)
        values = self.factor(n.value, columns, n.width, self.broad)
        sums = [[self.zeros(f"{name}{i}", t.wide, p.length) for i, p in enumerate(parts)]
                for name, parts in (("keys", self.deep), ("values", self.broad))]
        if n.group.size is ONE:
            self.past(keys, values, *sums)
        else:
            with self.loop(n.group, "0", self.index(n.group.size)):
                self.past(keys, values, *sums)
        self.finish(columns, *sums)
        return self.draft(grid)

    def past(self, keys: Sequence[str], values: Sequence[str], of_keys: Sequence[str], of_values: Sequence[str]
             ) -> None:
        n, g = self.n, self.gradient
        for w in self.walks():
            with self.walk(w) as rows:
                queries = self.factor(n.query, rows, n.depth, self.deep)
                p = self.softmax(w, self.dot(keys, transposed(queries)), self.logs())
                results = self.factor(g.result, rows, n.width, self.broad)
                kept = self.fresh("share")
                self.line(f"{kept} = tl.cast({self.kept(p)}, {self.d.types[self.kind]})")
                for name, x in zip(of_values, results, strict=True):
                    self.line(f"{name} = {self.dot([kept], [x], name)}")
                dp = self.dot(values, transposed(results))
                ds = self.slopes(w, p, dp, self.value(g.inner))
                for name, x in zip(of_keys, queries, strict=True):
                    self.line(f"{name} = {self.dot([ds], [x], name)}")

    def finish(self, columns: Side, of_keys: Sequence[str], of_values: Sequence[str]) -> None:
        n, places = self.n, dict(self.k.stores)
        key, value = n.names[1:3]
        if key in places:
            scale = self.value(self.gradient.scale)
            self.written(key, places[key], [f"{x} * {scale}" for x in of_keys], columns, n.depth, self.deep)
        if value in places:
            self.written(value, places[value], of_values, columns, n.width, self.broad)


def transposed(names: Sequence[str]) -> list[str]:
    return [f"tl.trans({x})" for x in names]
