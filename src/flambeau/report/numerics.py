"""The page docs/exact-operators.md: which operators keep eager's bits by a lowering, and which by a call.

python -m flambeau.report.numerics > docs/exact-operators.md
"""

from __future__ import annotations

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.exact import CPU_WIDE, is_exact
from flambeau.ops.registry import FAMILIES

HEAD = """# Operators with eager's bits

Which operators keep them under `options={"numerics": "eager"}` by a fused lowering, by family; every other one is a
call of eager's kernel. [Numerics](numerics.md) says how.

| family | fused on CUDA | fused on the CPU |
|---|---|---|
"""


def page() -> str:
    ops_loaded()
    fused: dict[str, dict[str, set[str]]] = {}
    for op in LOWERINGS:
        namespace, _, name = op._schema.name.partition("::")
        for device in ("cuda", "cpu"):
            if namespace == "aten" and is_exact(op, device):
                mark = " ¹" if device == "cpu" and name in CPU_WIDE else ""
                fused.setdefault(FAMILIES[op], {}).setdefault(device, set()).add(f"`{name}`{mark}")
    rows = ""
    for family, by in sorted(fused.items()):
        cuda, cpu = by.get("cuda", set()), by.get("cpu", set())
        same = "the same" if {c.removesuffix(" ¹") for c in cpu} == cuda and " ¹" not in "".join(cpu) else ""
        rows += f"| {family} | {', '.join(sorted(cuda)) or '-'} | {same or ', '.join(sorted(cpu)) or '-'} |\n"
    return f"{HEAD}{rows}\n¹ in float32 and float64; in half precision a call.\n"


if __name__ == "__main__":
    print(page(), end="")
