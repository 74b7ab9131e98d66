"""Both forms of OpenCL kernels as targets: that for CPUs, and that for GPUs, which runs on any available device."""

from __future__ import annotations

from flambeau.targets.base import register_target
from flambeau.targets.opencl.device import ClDevice, host_device
from flambeau.targets.opencl.target import OpenClTarget

THREADS, POINTS = "opencl", "opencl-points"
FORMS = (THREADS, POINTS)


class PointsTarget(OpenClTarget):
    name = POINTS


register_target(POINTS, lambda: PointsTarget(ClDevice(0, host_device().device, threads=False)))
