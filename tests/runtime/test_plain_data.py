"""Plain data: what comes back is what went in; what no encoder wrote is refused, and makes nothing."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flambeau.compile import cache_entry as graph_entry
from flambeau.compile import disk_cache as graph_cache
from flambeau.compile.disk_cache import GraphCache, Stored
from flambeau.config import config
from flambeau.runtime.launch_plan import Step
from flambeau.runtime.plain_data import DEPTH, Codec, Malformed, Record, Unwritable
from flambeau.targets.cache import DiskCache


class Colour(Enum):
    RED = 1
    GREEN = 2


class Point(NamedTuple):
    x: int
    y: int | None


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...]
    weights: dict[str, float]
    colour: Colour = Colour.RED
    anything: Any = None


MADE: list[Any] = []


@dataclass
class Noticed:
    value: int

    def __post_init__(self) -> None:
        MADE.append(self.value)


CODEC = Codec([Record(Shape), Record(Point), Record(Noticed)], enums=[Colour], values={"len": len, "int": int})


def again(x: Any) -> Any:
    return CODEC.decode(CODEC.encode(x))


NAN = struct.unpack(">d", bytes.fromhex("7ff8000000001234"))[0]  # with a payload
VALUES = [
    None, True, False, 0, -1, 2**63, -(10**30), "", "text\n\0 \u00e9 \ud800", b"", bytes(range(256)), 0.1, -0.0,
    math.inf, -math.inf, 5e-324, complex(1.5, -0.0), (), [], {}, set(), frozenset({1, 2}), {1, "a"},
    (1, (2.5, [None, ...])),
    {"k": 1, 2: "v", (1, 2): [3]}, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.device("cpu"),
    torch.device("cuda", 3), torch.strided, torch.sparse_coo, torch.channels_last, torch.Size([1, 0, 3]), Colour.GREEN,
    len, int, Point(1, None), Shape("s", (Point(1, 2),), {"w": math.inf}, Colour.GREEN, [Point(0, 0), Colour.RED]),
]


@pytest.mark.parametrize("x", VALUES, ids=lambda x: type(x).__name__)
def test_values(x: Any) -> None:
    y = again(x)
    assert type(y) is type(x) and y == x
    assert isinstance(x, (set, frozenset)) or repr(y) == repr(x)  # a set's elements have no order


def test_bits_of_numbers() -> None:
    bits = [struct.pack(">d", x) for x in (NAN, -0.0, 0.0)]
    assert [struct.pack(">d", x) for x in again([NAN, -0.0, 0.0])] == bits


@pytest.mark.parametrize("t", [
    torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(8)[2:6], torch.zeros(0, 3), torch.tensor(2.5),
    torch.arange(6).to(torch.bfloat16), torch.tensor([True, False]), torch.randn(2, dtype=torch.complex128),
    torch.ones(1).expand(5), torch.tensor([math.nan, -math.inf]),
], ids=lambda t: f"{t.dtype} {list(t.shape)} {list(t.stride())}")
def test_tensors(t: Tensor) -> None:
    u = again(t)
    assert u.dtype == t.dtype and u.stride() == t.stride() and u.storage_offset() == t.storage_offset()
    torch.testing.assert_close(u, t, rtol=0, atol=0, equal_nan=True)
    assert not t.numel() or u.data_ptr() != t.data_ptr()


def test_tensors_that_share_memory() -> None:
    """The same tensor twice is one tensor; a view of another stays one."""
    t = torch.zeros(6)
    a, b, c = again([t, t, t.view(2, 3)[1]])
    a[3:] = 7
    assert a is b and c.tolist() == [7, 7, 7]


@pytest.mark.parametrize("x", [
    object(), print, torch.nn.Linear(1, 1), torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(1)),
    torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), slice(1), range(3), Exception("x"),
    {"deep": [Noticed, 1]},
], ids=lambda x: type(x).__name__)
def test_what_is_not_in_the_table(x: Any) -> None:
    with pytest.raises(Unwritable):
        CODEC.encode({"a": [x]})


def test_the_way_to_it_is_named() -> None:
    with pytest.raises(Unwritable, match=r"^\.points\[0\]\.y is a builtins\.object$"):
        CODEC.encode(Shape("s", (Point(1, object()),), {}))  # type: ignore[arg-type]


def test_depth() -> None:
    deep: Any = []
    for _ in range(DEPTH + 1):
        deep = [deep]
    with pytest.raises(Unwritable, match="deep"):
        CODEC.encode(deep)
    for depth in (DEPTH + 1, 100_000):
        with pytest.raises(Malformed):
            CODEC.decode(head('["list",' * depth + "1" + "]" * depth))


def head(root: str, storages: str = "[]", rows: str = "[]", version: str = "1", data: bytes = b"") -> bytes:
    return f"[{version},{storages},{rows},{root}]".encode() + b"\n" + data


POINT = '["Point",1,2]'
HOSTILE = {
    "empty": b"",
    "no JSON": b"\x80\x04\x95",
    "not a list": b"{}\n",
    "another version": head("1", version="2"),
    "too few": b"[1,[],[]]\n",
    "a type that is not there": head('["os.system","true"]'),
    "a builtin": head('["eval","1"]'),
    "a value that is not there": head('["value","eval"]'),
    "an enum that is not there": head('["enum","Flag","RED"]'),
    "a member that is not there": head('["enum","Colour","__class__"]'),
    "a private attribute": head('["enum","Colour","_member_map_"]'),
    "a number of JSON": head("1.5"),
    "NaN of JSON": head("NaN"),
    "an object of JSON": head('{"a":1}'),
    "an empty list": head("[]"),
    "a tag that is a list": head('[["list"]]'),
    "too many fields": head('["Point",1,2,3]'),
    "too few fields": head('["Point",1]'),
    "a field of another type": head('["Point","1",2]'),
    "a boolean for a number": head('["Point",true,2]'),
    "an element of another type": head('["Shape","s",["tuple",1],["dict"],["enum","Colour","RED"],null]'),
    "a list for a tuple": head(f'["Shape","s",["list",{POINT}],["dict"],["enum","Colour","RED"],null]'),
    "a key of another type": head(f'["Shape","s",["tuple"],["dict",1,{POINT}],["enum","Colour","RED"],null]'),
    "a key without a value": head('["dict",1]'),
    "a key that has no hash": head('["dict",["list"],1]'),
    "a dtype that is none": head('["dtype","Tensor"]'),
    "a device that is none": head('["device","nowhere"]'),
    "digits that are none": head('["float","zz"]'),
    "half a number": head('["float","00"]'),
    "a size that is a text": head('["size","1"]'),
    "a tensor that is not there": head('["tensor",0]'),
    "a tensor of another count": head('["tensor",-1]', '[["cpu",4]]', '[[0,"float32",[1],[1],0]]', data=bytes(4))[:-1],
    "a tensor beyond its memory": head('["tensor",0]', '[["cpu",4]]', '[[0,"float32",[2],[1],0]]', data=bytes(4)),
    "a tensor after its memory": head('["tensor",0]', '[["cpu",4]]', '[[0,"float32",[1],[1],1]]', data=bytes(4)),
    "a tensor before its memory": head('["tensor",0]', '[["cpu",4]]', '[[0,"float32",[1],[1],-1]]', data=bytes(4)),
    "negative strides": head('["tensor",0]', '[["cpu",8]]', '[[0,"float32",[2],[-1],1]]', data=bytes(8)),
    "a huge tensor": head('["tensor",0]', '[["cpu",4]]', f'[[0,"float32",[{2**62}],[1],0]]', data=bytes(4)),
    "huge memory": head('["tensor",0]', f'[["cpu",{2**60}]]', '[[0,"float32",[1],[1],0]]', data=bytes(4)),
    "negative memory": head('["tensor",0]', '[["cpu",-4]]', '[[0,"float32",[1],[1],0]]', data=bytes(8)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_no_encoder_wrote(data: bytes) -> None:
    with pytest.raises(Malformed):
        CODEC.decode(data)


def test_a_constructor_gets_nothing_that_does_not_fit() -> None:
    MADE.clear()
    for root in ('["Noticed","1"]', '["Noticed",["Noticed",["list"]]]', '["Noticed"]'):
        with pytest.raises(Malformed):
            CODEC.decode(head(root))
    assert MADE == []


# ---- entries of graphs ---------------------------------------------------------------------------------


def views(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return x.view(-1), y, y.t(), x[1], y.view(-1)[2:4]


def held(x: Tensor) -> Tensor:
    return x.exp() * torch.tensor([1.0, -0.0, math.inf, 2.0, 3.0, 4.0])


GRAPHS: dict[str, Callable[..., Any]] = {
    "a softmax": lambda x: (x.sin() * x).softmax(-1),
    "views of inputs and of each other": views,
    "a tensor that it holds": held,
    "library calls": lambda x: (x @ x.t()).relu() @ x,
    "random numbers": lambda x: nn.functional.dropout(x, 0.3) + torch.rand_like(x),
    "an update": lambda x: x.detach().add_(1).cumsum(0) + x,
}


@pytest.fixture(scope="module")
def entries() -> dict[str, tuple[Any, bytes]]:
    """What torch hands over for some graphs, and the data of it."""
    found: dict[str, tuple[Any, bytes]] = {}
    patch = pytest.MonkeyPatch()
    with patch.context() as p, config.override(verify=False):
        for name, f in GRAPHS.items():
            for grad in (True,) if name in ("library calls", "random numbers", "an update") else (False, True):
                p.setattr(GraphCache, "load", lambda self: setattr(self, "free", "0" * 64))
                p.setattr(GraphCache, "store", lambda self, entry, parts, key=f"{name} {grad}": found.setdefault(
                    key, (entry, graph_entry.encode(entry))))
                torch._dynamo.reset()
                torch.compile(f, backend="flambeau", dynamic=name == "a softmax")(
                    torch.linspace(-1, 1, 24).view(4, 6).requires_grad_(grad))
    torch._dynamo.reset()
    assert len(found) == 9
    return found


def assert_same(a: Any, b: Any, way: str = "entry") -> None:
    """Compares all attributes, derived ones included, except those that are left out."""
    left_out = {name for _, _, instead, _ in graph_entry.TORCHS for name in instead}
    if hasattr(a, "as_tuple"):  # a step of a view
        a, b = (tuple(int(y) if "Mode" in type(y).__name__ else y for y in x.as_tuple()) for x in (a, b))
    assert type(a) is type(b), way
    if isinstance(a, Tensor):
        assert torch.equal(a, b) and a.stride() == b.stride(), way
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), way
        for k, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{way}[{k}]")
    elif isinstance(a, dict):
        assert list(a) == list(b), way
        for k in a:
            assert_same(a[k], b[k], f"{way}[{k!r}]")
    elif isinstance(a, Stored):
        assert_same(a.package, b.package, way)
    elif type(a).__name__ == "SerializedGraphModule":
        assert a.args[0]["_code"] == b.args[0]["_code"] and a.args[1] == b.args[1], way
        assert_same(a.args[0]["_buffers"], b.args[0]["_buffers"], way)
        assert len(b.deserialize().graph.nodes) == len(a.deserialize().graph.nodes), way
    elif is_dataclass(a) or type(a).__module__.startswith(("torch._functorch", "flambeau")):
        names = {f.name for f in fields(a)} if is_dataclass(a) else set()
        left_out |= {"metadata", "mutation_type", "compile_id_str"}  # torch sets the last one later
        for name in names | {n for n in vars(a) if not n.startswith("_")}:
            if name not in left_out:
                assert_same(getattr(a, name), getattr(b, name), f"{way}.{name}")
    else:
        assert a == b, way


def test_entries_come_back(entries: dict[str, tuple[Any, bytes]]) -> None:
    for name, (entry, data) in entries.items():
        made = graph_entry.decode(data)
        assert_same(entry, made, name)
        assert graph_entry.encode(made) == data, name


def mutations(data: bytes, count: int) -> Iterator[bytes]:
    """Changes random bits, bytes and ranges, and swaps types in well-formed data."""
    draw = random.Random(0)
    line, _, blobs = data.partition(b"\n")
    for k in range(count):
        if k % 4 == 0:
            changed = bytearray(data)
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            yield bytes(changed)
        elif k % 4 == 1:
            yield data[:draw.randrange(len(data))]
        elif k % 4 == 2:
            a, b = sorted(draw.randrange(len(data)) for _ in range(2))
            yield data[:a] + data[b:] + data[a:b]
        else:
            parsed = json.loads(line)
            places = list(lists_of(parsed))
            where = draw.choice(places)
            where[draw.randrange(len(where))] = draw.choice(
                [None, True, -1, 2**70, "__import__('os').abort()", 1.5, {}, [], ["list"], ["eval", "1"],
                 json.loads(json.dumps(draw.choice(places)[:3]))])
            yield json.dumps(parsed).encode() + b"\n" + blobs


def lists_of(x: Any) -> Iterator[list[Any]]:
    if isinstance(x, list):
        if x:
            yield x
        for y in x:
            yield from lists_of(y)


def test_mutated_entries(entries: dict[str, tuple[Any, bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 of them: each is refused, or is an entry with other values. Nothing of it is executed."""

    def executed(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was executed")

    monkeypatch.setattr("builtins.exec", executed)
    monkeypatch.setattr("builtins.eval", executed)
    refused = 0
    for _, data in entries.values():
        for changed in mutations(data, 2000 // len(entries) + 1):
            try:
                made = graph_entry.decode(changed)
            except Malformed:
                refused += 1
            else:
                assert type(made).__name__ == "BundledAOTAutogradResult"
    assert refused > 1000


def test_mutated_files(entries: dict[str, tuple[Any, bytes]], tmp_path: Any) -> None:
    """Mutated files in the cache are rejected before they are decoded."""
    disk = DiskCache(tmp_path / "cache")
    data = entries["a softmax True"][1]
    path = disk.put("0" * 64, data, graph_cache.SUFFIX)
    assert path is not None
    sealed = path.read_bytes()
    draw = random.Random(0)
    for _ in range(50):
        changed = bytearray(sealed)
        changed[draw.randrange(len(sealed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        path.chmod(0o600)
        assert disk.read("0" * 64, graph_cache.SUFFIX) is None


def test_a_graph_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, is not kept, and the reason is in the log."""
    reasons: list[str] = []
    monkeypatch.setattr(GraphCache, "refuse", staticmethod(lambda reason: reasons.append(str(reason))))
    records = graph_entry.codec().records
    record = records.pop(Step)
    try:
        torch._dynamo.reset()
        with config.override(verify=False):
            x = torch.linspace(0, 1, 7)
            made = torch.compile(lambda x: x.tanh() * 3.25, backend="flambeau")(x)
        torch.testing.assert_close(made, x.tanh() * 3.25)
    finally:
        records[Step] = record
    assert len(reasons) == 1 and "flambeau.runtime.launch_plan.Step" in reasons[0]
