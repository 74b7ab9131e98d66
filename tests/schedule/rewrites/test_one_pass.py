"""The largest element and the sum below it become one pass, whatever else their stages compute."""

from __future__ import annotations

import torch

from flambeau.ir.build import simple_combine
from flambeau.ir.expr import Expr, cast
from flambeau.ir.program import Item
from flambeau.ir.scalar import exp
from flambeau.schedule.rewrites.one_pass import exponentials_at_once


def test_values_of_other_dtypes_beside_them() -> None:
    x = Expr("local", torch.float32, (), "x")
    top = Item(("m",), "full", (x,), simple_combine("max", torch.float32))
    narrow = Item(("n",), "full", (cast(x, torch.bfloat16),))
    below = exp(x - Expr("local", torch.float32, (), "m"))
    total = Item(("s",), "full", (below,), simple_combine("sum", torch.float32))
    first, second = exponentials_at_once([(narrow, top), (total,)], {"n", "s"})
    assert first[0] is narrow and first[1].names == ("m", "s_at_once")
    assert [i.names for i in second] == [("s",)] and second[0].combine is None
    assert exponentials_at_once([(narrow,), (total,)], {"n", "s"}) == [(narrow,), (total,)]
