"""Which files are run, what each is run as ("sides"), and the names that a test has on all of them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import NamedTuple

DEVICE = "flambeau"
EXACT = "eager's numerics"  # this backend with numerics="eager", whose random numbers are eager's


class Kind(NamedTuple):
    """What a file's tests are run as, beside us ("sides")."""
    beside: tuple[str, ...]  # all of them: what passes there counts
    judges: tuple[str, ...]  # those that fail with us: whether they fail with whatever they were not made for, too


KINDS = {
    "device": Kind(("cpu",), ()),
    # Inductor takes long, and what we pass needs no judge. A test that aot_eager fails, which computes nothing by
    # itself, looks at something else than results: Inductor's code, counters, messages.
    "compile": Kind((), ("aot_eager", "stock", EXACT)),
    "skeleton": Kind((), ()),  # written for one device
}


class File(NamedTuple):
    path: str
    kind: str
    renames: tuple[tuple[str, str], ...] = ()  # in the text of the file, on our side: (what it says, what we need)
    classes: str = ""  # only the test classes of these names (a regular expression)


_SKELETON = "cpp_extensions/open_registration_extension/torch_openreg/tests"
_AREAS = ("autocast", "autograd", "compile", "device", "distributed", "event", "memory", "misc", "ops", "profiler",
          "rng", "storage", "streams", "utils")
FILES = (
    *(File(f"{name}.py", "device") for name in (
        "test_indexing", "test_view_ops", "test_shape_ops", "test_reductions", "test_scatter_gather_ops",
        "test_unary_ufuncs", "test_binary_ufuncs", "test_type_promotion",
        "test_tensor_creation_ops", "test_foreach", "nn/test_pooling", "nn/test_embedding", "nn/test_dropout",
        "test_torch")),
    # Where it is not CUDA's, the test fills at indices that it makes on the CPU.
    File("test_sort_and_select.py", "device", (
        (f'== "cuda":\n{" " * 16}return', f'!= "cpu":\n{" " * 16}return'),)),
    File("test_autocast.py", "device", (('"cpu"', f'"{DEVICE}"'), ("torch.cpu.amp", f"torch.{DEVICE}.amp")),
         "TestAutocastCPU|TestTorchAutocast"),
    *(File(f"{_SKELETON}/test_{area}.py", "skeleton", (("openreg", DEVICE), ("OPENREG", DEVICE.upper())))
      for area in _AREAS),
    File("inductor/test_torchinductor.py", "compile", classes="CpuTests|SweepInputsCpuTest|TestFull"),
    File("inductor/test_torchinductor_dynamic_shapes.py", "compile",
         classes="DynamicShapesCpuTests|TestInductorDynamic"),
    File("dynamo/test_repros.py", "compile"),
)

DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")
_ALL_DTYPES = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "uint8", "uint16",
               "uint32", "uint64", "int8", "int16", "int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2",
               "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8", "qint32")
# A test for devices is called CLASS + DEVICE . test_NAME + _device + _dtypes.
_CLASS = re.compile(r"(?:CPU|PRIVATEUSE1|FLAMBEAU)$")
_METHOD = re.compile(rf"_(?:cpu|{DEVICE})((?:_(?:{'|'.join(_ALL_DTYPES)}))*)$")


def common_name(test: str) -> str:
    """The name of a device's test, the same for all devices."""
    owner, method = test.split(".", 1)
    return _CLASS.sub("", owner) + "." + _METHOD.sub(r"\1", method)


def dtypes_of(test: str) -> tuple[str, ...]:
    """The dtypes in the name of a device's test."""
    found = _METHOD.search(test)
    return tuple(re.findall("|".join(_ALL_DTYPES), found[1])) if found else ()


def chosen(tests: Iterable[str], dtypes: Iterable[str], shard: tuple[int, int] = (1, 1)) -> list[str]:
    """Those of the dtypes, or without any; shard k of n; in an order by chance, the same each time.

    So a file that is stopped by its time limit leaves a sample of it.
    """
    allowed = set(dtypes)
    drawn = [(zlib.crc32(common_name(test).encode()), test) for test in tests if allowed.issuperset(dtypes_of(test))]
    return [test for number, test in sorted(drawn) if number % shard[1] == shard[0] - 1]
