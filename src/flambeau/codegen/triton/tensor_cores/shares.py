"""A contraction's steps divided equally among programs, independent of where tiles begin and end.

Programs are numbered from the last one: the program that begins a tile takes over the rest of the tile's sum from
programs that started before it, so that no program waits for one that has not started. A program first sums its share
of a tile that another one begins, and begins a tile of its own last, so that there is hardly any waiting. Sums are
added in the order of the depth: results depend on the number of processors, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.index import as_index, ceildiv, volume

from .ragged import RaggedTiles


class SharedTiles(RaggedTiles):
    def begin_share(self, tiles: str) -> str:
        """Writes a program's range of steps; returns the header of the loop over its tiles, or parts of tiles."""
        steps = self.index(ceildiv(volume(self.k.depth), as_index(self.deep)))
        self.line(f"steps = tl.cast({steps if volume(self.k.depth).is_const else f'tl.maximum({steps}, 1)'}, tl.int32)")
        self.line(f"total = steps * tl.cast({tiles}, tl.int64)")
        self.line("me = tl.num_programs(0) - 1 - tl.program_id(0)")
        self.line("at, end = fl.portion(total, me), fl.portion(total, me + 1)")
        return "while at < end:"

    def share_grid(self, tiles: str, most: str) -> tuple[str, str]:
        """Returns the number of programs (each has at least `least_steps` steps) and the workspace bytes for the sums
        that they leave."""
        t, products = self.t, len(self.k.products)
        steps = self.host(ceildiv(volume(self.k.depth), as_index(self.deep)))
        programs = f"max(min({most}, ({tiles}) * ({steps}) // {t.least_steps}), min({most}, {tiles}))"
        return programs, f"{self.sums.itemsize * t.high * t.wide * products} * {programs}"

    def next_tile(self) -> None:
        self.line("tile = tl.cast(at // steps, tl.int32)")
        self.line("first = tl.cast(at % steps, tl.int32)")
        self.line("last = tl.cast(tl.minimum(first + end - at, steps), tl.int32)")

    def leave_or_take(self, sums: Sequence[str]) -> None:
        """Leaves the sum of a tile that another program began to that one; adds to a tile begun here what others have
        left."""
        wides = self.t.wides * len(self.k.products)
        places = [self.fresh("left") for _ in sums]
        size, at = self.t.high * sum(wides), 0
        for place, wide in zip(places, wides, strict=True):
            index = f"tl.arange(0, {self.t.high})[:, None] * {wide} + tl.arange(0, {wide})[None, :]"
            self.line(f"{place} = work.to(tl.pointer_type({self.d.types[self.sums]})) + ({at} + {index})")
            at += self.t.high * wide
        with self.scope("if first > 0:", footer=""):
            for name, place in zip(sums, places, strict=True):
                self.line(f"tl.store({place} + me.to(tl.int64) * {size}, {name})")
            self.line("fl.tell(flags + me)")
        self.line("done, other = tl.cast(last, tl.int64), me + 1")
        # A tile that is whole, or that another program began, takes nothing from others.
        with self.scope("while (first == 0) & (done < steps):", footer=""):
            self.line("fl.hear(flags + other)")
            for name, place in zip(sums, places, strict=True):
                self.line(f'{name} += tl.load({place} + other.to(tl.int64) * {size}, cache_modifier=".cg")')
            self.line("done = fl.portion(total, other + 1) - tile * tl.cast(steps, tl.int64)")
            self.line("other += 1")
