"""The page docs/reference/exact-operators.md: which operators keep eager's bits by a lowering, and which by a call.

python -m flambeau.report.numerics > docs/reference/exact-operators.md
"""

from __future__ import annotations

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import facts, is_exact

HEAD = """# Operators with eager's bits

Which operators keep them under `options={"numerics": "eager"}` by a fused lowering, by family. Some that only move
values (`stack`, `pixel_shuffle`) are taken apart into such; every other one is a call of eager's kernel.
[Numerics](../guides/numerics.md) says how.

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
    return f"{HEAD}{rows}\n¹ in float32 and float64; in half precision a call.\n² in float16 a call.\n"


if __name__ == "__main__":
    print(page(), end="")
