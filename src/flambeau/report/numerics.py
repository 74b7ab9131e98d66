"""Writes docs/reference/exact-operators.md: which operators are fused with numerics="eager".

python -m flambeau.report.numerics > docs/reference/exact-operators.md
"""

from __future__ import annotations

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import facts, is_exact

HEAD = """# Operators that are fused with numerics="eager"

With `options={"numerics": "eager"}`, results equal eager's bit for bit. The operators in this table have a lowering
that rounds exactly as eager does, and are fused. Some operators that only move values (`stack`, `pixel_shuffle`) are
decomposed into such operators. For every other operator, eager's kernel is called.
[Exact numerics](../guides/numerics.md) explains how.

| family | fused on CUDA | fused on the CPU |
|---|---|---|
"""
MARKS = {"cpu": " ¹", "cuda": " ²"}


def page() -> str:
    ops_loaded()
    fused: dict[str, dict[str, set[str]]] = {}
    for op in LOWERINGS:
        namespace, _, name = op._schema.name.partition("::")
        for device in ("cuda", "cpu"):
            if namespace == "aten" and is_exact(op, device):
                mark = MARKS[device] if facts(op).exact[device] else ""
                fused.setdefault(facts(op).family, {}).setdefault(device, set()).add(f"`{name}`{mark}")
    rows = ""
    for family, by in sorted(fused.items()):
        cuda, cpu = by.get("cuda", set()), by.get("cpu", set())
        same = "the same" if cpu == cuda else ""
        rows += f"| {family} | {', '.join(sorted(cuda)) or '-'} | {same or ', '.join(sorted(cpu)) or '-'} |\n"
    return (f"{HEAD}{rows}\n¹ in float32 and float64; in half precision, eager's kernel is called.\n"
            "² in float16, eager's kernel is called.\n")


if __name__ == "__main__":
    print(page(), end="")
