"""The numerics policy as plain data: where a compiled graph may compute differently from eager.

A graph carries its policy. Lowerings, passes and targets ask it, and nothing else reads the setting. Exact means the
bits of eager's kernels on the graph's device; the differences between those devices are the rows of `EAGER`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    rounds: bool = False  # also between fused operators, where eager stores a value of half precision
    # Every value has the bits of eager's kernels for this type of device. An operator whose lowering cannot promise
    # that is a call of eager's kernel.
    kernels: str = ""
    fuses_multiply_add: bool = False  # eager's compiler contracts a * b + c to one rounding wherever it sees it
    reciprocals: bool = False  # where eager divides by a number, it multiplies by the number's reciprocal
    orders_zeros: bool = False  # of two zeros, eager's maximum is the positive one and its minimum the negative one
    steps: bool = False  # some of eager's kernels compute in the dtype of their tensors, and round at every step

    @property
    def exact(self) -> bool:
        return bool(self.kernels)


FAST = Policy()
# The policies by type of device. On other devices eager's kernels are our own, one operator at a time.
EAGER = {
    "cpu": Policy(rounds=True, kernels="cpu", fuses_multiply_add=True),
    "cuda": Policy(rounds=True, kernels="cuda", fuses_multiply_add=True, reciprocals=True, orders_zeros=True,
                   steps=True),
}


def wants_bits(numerics: str) -> bool:
    """Whether the setting promises eager's bits: operators that would be computed differently are then left to
    eager."""
    return numerics == "eager"


def policy_of(numerics: str, device: str) -> Policy:
    """Returns the policy that the setting `numerics` (fast or eager) asks for on a device.

    near: rounds as eager does, and has its bits where eager's functions are available (a CPU's come from a vector
    library of its own).
    """
    exact = EAGER.get(device) if wants_bits(numerics) or device == "cuda" else None
    return FAST if numerics == "fast" else exact or Policy(rounds=True)
