"""Both shapes of OpenCL kernels as targets: those for CPUs, and those for GPUs on whatever device there is."""

from __future__ import annotations

from flambeau.targets.base import register_target
from flambeau.targets.opencl.device import ClDevice, host_device
from flambeau.targets.opencl.target import OpenClTarget

THREADS, POINTS = "opencl", "opencl-points"
FORMS = (THREADS, POINTS)


class PointsTarget(OpenClTarget):
    name = POINTS


register_target(POINTS, lambda: PointsTarget(ClDevice(0, host_device().device, threads=False)))
