"""Settings for PoCL, the OpenCL driver for CPUs that comes from the package index.

    with a_core_for_each_thread():
        found = platform.get_devices()
    name_the_cpu(device.int_ptr)
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLATFORM = "Portable Computing Language"
_PINNED = "POCL_AFFINITY"
_FEWER = ("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT")  # threads than cores
_UNKNOWN = b"generic\0"
# by feature, else x86-64: the names that PoCL's libraries exist for
_NAMES = {"avx512vl": b"skylake-avx512", "avx2": b"haswell"}
_RECORD = 4096  # bytes of a device's record that are searched; it is shorter
_given: list[ctypes.Array[ctypes.c_char]] = []  # names that drivers hold pointers to


@contextmanager
def a_core_for_each_thread() -> Iterator[None]:
    """Pins PoCL's threads, as many as there are cores, to one core each.

    They sleep whenever a kernel ends, and a system that wakes two of them on the same core never lets them work at the
    same time. Not done if the process has only some of the cores: PoCL would not know which.
    """
    whole = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == os.cpu_count()
    if not whole or any(name in os.environ for name in (_PINNED, *_FEWER)):
        yield
        return
    os.environ[_PINNED] = "1"
    try:
        yield
    finally:
        del os.environ[_PINNED]  # processes that this one starts decide for themselves


def _features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def name_the_cpu(record: int) -> str:
    """Gives a device a CPU to compile for, if PoCL found none. Returns its name, or nothing.

    The compiler inside PoCL has no name for x86 CPUs that are younger than itself. It says `generic`, which it then
    refuses ("unknown target CPU 'generic'", pocl/pocl#1049), and no build option names another one. The name is a
    pointer in the device's record. Memory is read through the system, which reports an error for unmapped addresses.
    Processes without torch use this too.
    """
    if platform.machine() != "x86_64" or not os.path.exists("/proc/self/mem"):
        return ""
    name = next((name for feature, name in _NAMES.items() if feature in _features()), b"x86-64")
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        def read(address: int, size: int) -> bytes:
            try:
                return os.pread(memory.fileno(), size, address)
            except (OSError, OverflowError):
                return b""

        words = read(record, _RECORD)
        for at in range(0, len(words) - 7, 8):
            address, = struct.unpack_from("Q", words, at)
            if address and read(address, len(_UNKNOWN)) == _UNKNOWN:
                _given.append(ctypes.create_string_buffer(name))
                ctypes.c_uint64.from_address(record + at).value = ctypes.addressof(_given[-1])
                return name.decode()
    return ""


def name_all_cpus() -> None:
    """Of processes that use the driver themselves, through the library that PyOpenCL has brought along."""
    try:
        import pyopencl
    except ImportError:
        return
    try:
        with a_core_for_each_thread():
            found = [d for p in pyopencl.get_platforms() if p.name.strip() == PLATFORM for d in p.get_devices()]
    except pyopencl.Error:  # there is no platform
        return
    for device in found:
        if device.type & pyopencl.device_type.CPU:
            name_the_cpu(device.int_ptr)
