"""The page docs/numerics.md: what eager numerics promise, and which operators keep it by a lowering or by a call.

python -m flambeau.report.numerics > docs/numerics.md
"""

from __future__ import annotations

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.exact import CPU_WIDE, is_exact
from flambeau.ops.registry import FAMILIES

HEAD = """# Numerics

`torch.compile(model, backend="flambeau", options={"numerics": ...})`, or `FLAMBEAU_NUMERICS`.

| setting | what it means |
|---|---|
| `fast` (the default) | fused operators keep float32 between them; sums are made in the order that is fastest |
| `eager` | every value has the bits that eager PyTorch gives it, on the same device with the same torch |

NaN is NaN, whatever its payload. Random numbers are eager's, and its generator ends in the same state.

## How eager numerics are kept

One policy (`ir/numerics.py`) goes with a graph, and lowerings, passes and targets ask it.

- An operator is **fused** if its lowering is exact: it moves, compares or chooses values, or it is eager's own formula,
  rounding by rounding. Half precision is rounded between operators where eager stores it.
- Every other operator is **a call of eager's kernel**: reductions, scans, softmax, norms, losses, average pooling,
  random numbers, contractions. What stands around it is fused.
- Nothing is taken apart that eager does not take apart: the tables of decompositions are empty.
- On CUDA, `a * b + c` is one fused multiply-add exactly where nvcc makes one of it within eager's kernel, read from
  machine code; division and square root are IEEE's; a quotient by a number is a product with its reciprocal, but not in
  operators over lists; numbers below the least normal one are kept. The functions (`exp`, `tanh`) are those of the
  CUDA toolkit's device library, if one of torch's version is found (`flambeau doctor` says so); else what changed
  between it and Triton's copy is a call. `pow` by numbers other than 0, 1, 2, 3, 1/2, -1/2, -1 and -2 is always one.
- On a CPU, eager has its functions from a vector library: operators that need one (`exp`, `sqrt`, `gelu`) are calls.
  So are formulas of several steps in half precision, which eager itself rounds in one way in its vectors and in
  another in what is left over after them.

Known limits: the gradient of `prod`, which torch traces by another formula than it runs; operators whose own results
differ from run to run.

## Operators

Those with a lowering, by family. What is not listed is a call.

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
