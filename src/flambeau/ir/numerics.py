"""The numerics policy as plain data: where a compiled graph may compute differently from eager.

A graph carries its policy. Lowerings, passes and targets ask it, and nobody else looks at the setting. To be exact is
to have the bits of eager's kernels on the graph's device; what differs between those devices is a row in `EAGER`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    rounds: bool = False  # between fused operators too, where eager stores a value of half precision
    # Every value has the bits of eager's kernels for this type of device; an operator whose lowering cannot promise
    # that, is a call of the kernel itself.
    kernels: str = ""
    fuses_multiply_add: bool = False  # eager's compiler makes one rounding of a * b + c wherever it sees it
    reciprocals: bool = False  # what eager divides by a number, it multiplies by the number's reciprocal
    orders_zeros: bool = False  # of two zeros, eager's maxima are the positive one and its minima the negative one
    steps: bool = False  # some of eager's kernels compute in the dtype of their tensors, and round at every step

    @property
    def exact(self) -> bool:
        return bool(self.kernels)


FAST = Policy()
# By the type of device. Elsewhere eager's kernels are our own, one operator at a time.
EAGER = {
    "cpu": Policy(rounds=True, kernels="cpu", fuses_multiply_add=True),
    "cuda": Policy(rounds=True, kernels="cuda", fuses_multiply_add=True, reciprocals=True, orders_zeros=True,
                   steps=True),
}


def wants_bits(numerics: str) -> bool:
    """Whether the setting promises eager's bits: then what is computed otherwise is left to eager."""
    return numerics == "eager"


def policy_of(numerics: str, device: str) -> Policy:
    """The policy that the setting `numerics` (fast or eager) asks for on a device.

    near: rounds as eager does, and has its bits where eager's functions are at hand (a CPU's come from a vector
    library of its own).
    """
    exact = EAGER.get(device) if wants_bits(numerics) or device == "cuda" else None
    return FAST if numerics == "fast" else exact or Policy(rounds=True)
