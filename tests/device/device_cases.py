"""What test_device.py runs in a process of its own: two devices, both of them the first that OpenCL has."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import multiprocessing
import pickle
import resource
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flambeau
from flambeau.config import config
from flambeau.device.fallback import reset_fallbacks
from flambeau.targets.opencl import driver as opencl_driver
from two_devices import DEV, enabled, numbers, quiet, same  # noqa: F401

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)


# ---- devices ---------------------------------------------------------------------------------------------


def test_the_module() -> None:
    module = torch.get_device_module(DEV)
    assert module is torch.flambeau and module.is_available() and module.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device(DEV) and torch.accelerator.device_count() == 2
    assert module.get_device_name(0) == module.get_device_name("flambeau:1")


def test_the_current_device() -> None:
    assert torch.flambeau.current_device() == 0
    with torch.flambeau.device(1):
        assert torch.empty(2, device=DEV).device == torch.device("flambeau:1")
    assert torch.empty(2, device=DEV).device == torch.device("flambeau:0")
    torch.flambeau.set_device("flambeau:1")
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.flambeau.current_device()))
    thread.start()
    thread.join()
    assert torch.flambeau.current_device() == 1 and seen == [0]
    torch.flambeau.set_device(0)


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="flambeau:7 does not exist: there are 2 devices"):
        torch.empty(2, device="flambeau:7")
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.flambeau.set_device(7)
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.ones(2).to("flambeau:7")
    assert torch.flambeau.current_device() == 0


def test_devices_do_not_mix() -> None:
    a, b = torch.ones(2, 2, device="flambeau:0"), torch.ones(2, 2, device="flambeau:1")
    for other in (b, torch.ones(2, 2)):
        with pytest.raises(RuntimeError, match="same device"):
            a @ other
        with pytest.raises(RuntimeError, match="same device"):
            a + other
    same(a + torch.tensor(2.0), torch.full((2, 2), 3.0))  # a number goes everywhere


def test_copies_between_devices() -> None:
    x = numbers(5, 7)
    a = x.to("flambeau:0")
    b = a.to("flambeau:1")
    assert b.device.index == 1
    same(b, x)
    a.t()[1:3].copy_(b.t()[3:5])
    x.t()[1:3] = x.t()[3:5].clone()
    same(a, x)


# ---- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allocation(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0), (4,), (2, 3, 5)):
        x = torch.empty(shape, dtype=dtype, device=DEV)
        assert x.shape == shape and x.dtype == dtype and x.device == torch.device("flambeau:0") and x.is_contiguous()
        same(numbers(*shape, dtype=dtype).to(DEV), numbers(*shape, dtype=dtype))
    assert torch.empty_strided((2, 3), (1, 4), dtype=dtype, device=DEV).stride() == (1, 4)
    assert torch.empty(2, 3, 4, 5, device=DEV, memory_format=torch.channels_last).stride() == (60, 1, 15, 3)


def test_layouts_that_there_are_not() -> None:
    with pytest.raises(RuntimeError, match="Unsupported device type for mkldnn layout: flambeau"):
        torch.empty(2, layout=torch._mkldnn, device=DEV)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="Quantizedflambeau"):
        torch.quantize_per_tensor(torch.ones(2, device=DEV), 0.1, 0, torch.quint8)
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(2, device=DEV).to_sparse().pin_memory()
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(2, device=DEV, pin_memory=True)


def test_statistics() -> None:
    torch.flambeau.empty_cache()
    before = torch.flambeau.memory_allocated()
    reserved = torch.flambeau.memory_reserved()
    x = torch.empty(3 << 20, dtype=torch.uint8, device=DEV)
    assert torch.flambeau.memory_allocated() == before + (3 << 20)
    assert torch.flambeau.memory_stats()["requested_bytes.all.current"] >= 3 << 20
    address = x.data_ptr()
    del x
    assert torch.flambeau.memory_allocated() == before
    assert torch.flambeau.memory_reserved() == reserved + (3 << 20)
    assert torch.empty(3 << 20, dtype=torch.uint8, device=DEV).data_ptr() == address  # out of the cache
    assert torch.flambeau.max_memory_allocated() >= before + (3 << 20)
    torch.flambeau.empty_cache()
    torch.flambeau.reset_peak_memory_stats()
    assert torch.flambeau.memory_reserved() == reserved
    assert torch.flambeau.max_memory_allocated() == torch.flambeau.memory_allocated()
    free, total = torch.flambeau.mem_get_info()
    assert 0 < free <= total


def test_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="flambeau:0 is out of memory"):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEV)
    same(torch.ones(3, device=DEV), torch.ones(3))


def test_memory_that_the_host_does_not_have() -> None:
    """Of a device that works in the memory of the host; a driver that finds out at the first use would crash."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = sum(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
               if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (64 << 20), before[1]))
    try:
        with pytest.raises(torch.OutOfMemoryError, match="flambeau:0 is out of memory"):
            torch.empty(512 << 20, dtype=torch.uint8, device=DEV).fill_(1)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    same(torch.ones(3, device=DEV), torch.ones(3))


def test_the_cache_is_emptied_before_memory_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.flambeau.empty_cache()
    driver = _driver()
    size = 4 << 20
    block = torch.empty(2 * size, dtype=torch.uint8, device=DEV)
    del block  # cached, and too large to serve what comes
    limit = driver._used[0] + size - 1
    plain = driver.found[0].device

    class Small:
        global_mem_size = limit
        max_mem_alloc_size = plain.max_mem_alloc_size

    monkeypatch.setattr(driver.found[0], "device", Small)
    x = torch.empty(size, dtype=torch.uint8, device=DEV)
    assert torch.flambeau.memory_stats()["num_alloc_retries"] >= 1
    with pytest.raises(torch.OutOfMemoryError, match=f"The device has {limit} bytes"):
        torch.empty(2 * size, dtype=torch.uint8, device=DEV)
    assert x.numel() == size


def _driver() -> opencl_driver.ClDriver:
    from flambeau.device import torch_module as device_module

    found: Any = device_module._core._driver
    return found


def test_a_stray_address_is_no_memory() -> None:
    with pytest.raises(RuntimeError, match="not in memory"):
        _driver().find(0x1234)


def test_tensors_begin_at_different_places_of_their_pages() -> None:
    if not _driver().found[0].is_cpu:
        pytest.skip("only CPUs mistake addresses for each other")
    torch.flambeau.empty_cache()
    host = [numbers(5000 + k) for k in range(4)]
    there = [x.to(DEV) for x in host]
    places = [at for _, at in (_driver().find(t.data_ptr()) for t in there)]
    assert len({at % opencl_driver.PAGE for at in places}) == 4 and all(at % 128 == 0 for at in places)
    for x, t in zip(host, there, strict=True):
        same(t[4:], x[4:])
        same(t[7:] * 2, x[7:] * 2)


def test_memory_that_was_freed_last_is_used_first() -> None:
    blocks = [torch.empty(3 << 20, dtype=torch.uint8, device=DEV) for _ in range(3)]
    last = blocks[1].data_ptr()
    for k in (0, 2, 1):
        blocks[k] = torch.empty(0)
    assert torch.empty(3 << 20, dtype=torch.uint8, device=DEV).data_ptr() == last


def test_pinned_memory() -> None:
    x = numbers(1000).pin_memory()
    assert x.is_pinned() and x[10:].is_pinned() and not numbers(3).is_pinned()
    a = x.to(DEV, non_blocking=True)
    back = torch.empty(1000, pin_memory=True)
    back.copy_(a, non_blocking=True)
    torch.flambeau.synchronize()
    same(back, x)
    for _ in range(20):  # the source may go while its copy is under way
        a = torch.full((1 << 16,), 3.0).pin_memory().to(DEV, non_blocking=True)
    same(a, torch.full((1 << 16,), 3.0))


# ---- views, strides, storages ----------------------------------------------------------------------------


def test_views_share_memory() -> None:
    x, c = numbers(4, 6).to(DEV), numbers(4, 6)
    for t in (x, c):
        t.view(6, 4)[1, 2] = 100
        t.t()[3].fill_(50)
        t[::2, 1::2].mul_(2)
        t.unfold(1, 3, 2)[0, 1].zero_()
        t.as_strided((2, 2), (7, 2), 3).add_(1)
        t.diagonal()[:2] = -1
    same(x, c)
    assert x.view(-1)[5:].storage_offset() == 5 and x[1:].untyped_storage().data_ptr() == x.data_ptr()
    same(x.unfold(1, 3, 2), c.unfold(1, 3, 2))
    same(x.expand(3, 4, 6), c.expand(3, 4, 6))
    same(x[1].view(torch.int32), c[1].view(torch.int32))


def test_complex_views() -> None:
    x, c = (numbers(3, 4) + 1j * numbers(3, 4).flip(0)).to(DEV), numbers(3, 4) + 1j * numbers(3, 4).flip(0)
    assert x.conj().is_conj()
    for t in (lambda z: z.conj(), lambda z: torch.view_as_real(z), lambda z: z.imag, lambda z: z.conj().imag,
              lambda z: z.conj().t()[1:], lambda z: z.conj() * 2, lambda z: z.conj().resolve_conj(),
              lambda z: torch.view_as_complex(torch.view_as_real(z).contiguous())):
        same(t(x), t(c))
    x.conj().copy_(c * 1j)
    same(x, (c * 1j).conj().resolve_conj())
    assert x.conj()[0, 0].item() == (c * 1j)[0, 0].item()


def test_resize_and_set() -> None:
    x, c = numbers(6).to(DEV), numbers(6)
    x.resize_(2, 5)
    c.resize_(2, 5)
    same(x.view(-1)[:6], c.view(-1)[:6])
    x.resize_(0)
    assert x.shape == (0,) and x.untyped_storage().nbytes() == 40
    y = torch.empty(0, device=DEV).set_(x.untyped_storage(), 2, (2, 2), (1, 2))
    same(y, c.as_strided((2, 2), (1, 2), 2))
    same(torch.empty(0, device=DEV).set_(x.untyped_storage())[:6], c.view(-1)[:6])
    assert torch.empty(0, device=DEV).set_(y).data_ptr() == y.data_ptr()
    assert y.set_().numel() == 0
    grown = torch.empty(0, device=DEV).set_(numbers(2).to(DEV).untyped_storage(), 0, (4,), (1,))
    same(grown[:2], numbers(2))
    storage = numbers(4).to(DEV).untyped_storage()
    storage.resize_(64)
    assert storage.nbytes() == 64 and storage.device == torch.device("flambeau:0")
    same(torch.empty(0, device=DEV).set_(storage)[:4], numbers(4))
    same(torch.empty(3, 4, 2, 2, device=DEV).resize_(2, 3, 4, 5, memory_format=torch.channels_last).zero_(),
         torch.zeros(2, 3, 4, 5))


# ---- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_copies_between_all_dtypes(source: torch.dtype) -> None:
    for target in DTYPES:
        if source.is_complex and not target.is_complex:
            continue
        c = numbers(4, 5, dtype=source)
        wanted = c.to(target)
        same(c.to(DEV).to(target), wanted)
        same(torch.empty(4, 5, dtype=target, device=DEV).copy_(c), wanted)
        same(torch.empty(4, 5, dtype=target).copy_(c.to(DEV)), wanted)


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "every other": lambda t: torch.cat((t, t), 1)[:, ::2] if t.numel() else t,
    "inside": lambda t: F.pad(t, (2, 1, 1, 2))[1:-2, 2:-1],
}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_copies_between_layouts(source: str, target: str) -> None:
    values = LAYOUTS[source](numbers(6, 4))
    for here, there in itertools.product((DEV, "cpu"), (DEV, "cpu")):
        into = _moved(LAYOUTS[target](torch.full((6, 4), 9.0)), there)
        assert into.stride() == LAYOUTS[target](numbers(6, 4)).stride()
        same(into.copy_(_moved(values, here)), values)


def _moved(t: torch.Tensor, device: str) -> torch.Tensor:
    """The same geometry, on a device."""
    if device == "cpu":
        return t
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def test_gaps_of_a_target_stay() -> None:
    whole = torch.full((4, 6), 5.0, device=DEV)
    whole[1:3, ::2].copy_(numbers(2, 3))
    whole[0, 1::2].copy_(numbers(3).to(DEV))
    wanted = torch.full((4, 6), 5.0)
    wanted[1:3, ::2], wanted[0, 1::2] = numbers(2, 3), numbers(3)
    same(whole, wanted)


@pytest.mark.parametrize("use", [
    lambda x: x.roll(1, 2), lambda x: nn.functional.logsigmoid(x), lambda x: nn.functional.max_pool3d(x[0], 2),
    lambda x: nn.functional.pad(x, (1,) * 6, mode="reflect"), lambda x: torch.normal(x, x.abs()),
    lambda x: nn.functional.conv2d(
        x.new_ones(2, 3, 80, 80).to(memory_format=torch.channels_last), x[:, :, 1, :3, :3])])
def test_strides_are_the_cpu_s(use: Any) -> None:
    x = numbers(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    assert use(x.to(DEV)).stride() == use(x).stride()


@pytest.mark.parametrize("fill", [
    lambda out: torch.arange(4, out=out), lambda out: torch.linspace(0, 3, 4, out=out),
    lambda out: torch.logspace(0, 3, 4, out=out)], ids=["arange", "linspace", "logspace"])
def test_ranges_keep_the_shape_of_what_they_fill(fill: Any) -> None:
    for part in (slice(1, 3), slice(0, 3)):  # as many elements, and others
        expected, x = torch.zeros(2, 3), torch.zeros(2, 3, device=DEV)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert fill(x[:, part]).shape == fill(expected[:, part]).shape
        assert len({str(w.message).partition(" (Triggered")[0] for w in said}) <= 1  # the same words twice
        same(x, expected)
    out = torch.zeros(2, 3, dtype=torch.int64, device=DEV).t()
    assert torch.randperm(6, out=out, device=DEV).sort()[0].tolist() == [*range(6)]


def test_bounds_that_a_dtype_does_not_have() -> None:
    """Eager warns of them."""
    for bounds in ((0, 2**24 + 1), (0, 2**24 + 2), (-2**24 - 1, 0)):
        said = []
        for device in ("cpu", DEV):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                torch.zeros(3, device=device).random_(*bounds)
            said.append([str(w.message).partition(" (Triggered")[0] for w in told])
        assert said[0] == said[1]


def test_copies_of_numbers() -> None:
    x = torch.zeros(3, 4, device=DEV)
    x.copy_(2.5)
    x[:, ::2].copy_(torch.inf)
    same(x, torch.tensor([[torch.inf, 2.5, torch.inf, 2.5]] * 3))
    same(torch.zeros(2, dtype=torch.int64, device=DEV).copy_(7), torch.tensor([7, 7]))
    with pytest.raises(RuntimeError, match="Empty tensor not supported"):
        torch.ops.aten._local_scalar_dense(x[:0])


def test_copies_that_broadcast_or_overlap() -> None:
    x = torch.empty(3, 4, device=DEV).copy_(numbers(4))
    same(x, numbers(4).expand(3, 4))
    same(x.copy_(torch.tensor(2.0)), torch.full((3, 4), 2.0))
    same(x.copy_(numbers(4).to(DEV)), numbers(4).expand(3, 4))
    y = numbers(10).to(DEV)
    y[2:].copy_(y[:-2].clone())
    assert y.copy_(y) is y
    same(y[2:], numbers(10)[:-2])
    assert torch.empty(0, 3, device=DEV).copy_(torch.empty(0, 3)).shape == (0, 3)
    with pytest.raises(RuntimeError):
        torch.empty(3, device=DEV).copy_(torch.empty(4))


def test_item_and_printing() -> None:
    assert torch.tensor(3, device=DEV).item() == 3 and numbers(4).to(DEV)[2].item() == numbers(4)[2].item()
    assert torch.tensor(2 + 3j, device=DEV).item() == 2 + 3j and bool(torch.tensor(True, device=DEV))
    assert numbers(3).to(DEV).tolist() == numbers(3).tolist()
    assert repr(torch.tensor([1.0, 2.0], device=DEV)) == "tensor([1., 2.], device='flambeau:0')"
    assert repr(numbers(2).to(DEV).numpy(force=True)) == repr(numbers(2).numpy())


def test_saving(tmp_path: Path) -> None:
    x = numbers(4, 5).to(DEV)
    state = {"x": x, "view": x[1:, ::2], "p": nn.Parameter(x.clone())}
    torch.save(state, tmp_path / "state.pt")
    for where, device in ((None, "flambeau:0"), ("cpu", "cpu"), ("flambeau:1", "flambeau:1")):
        loaded = torch.load(tmp_path / "state.pt", map_location=where)
        assert loaded["x"].device == torch.device(device) and loaded["p"].requires_grad
        assert loaded["view"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
        same(loaded["view"], numbers(4, 5)[1:, ::2])
    torch.save(numbers(3), tmp_path / "cpu.pt")
    assert torch.load(tmp_path / "cpu.pt", map_location=DEV).device.type == DEV


def test_pickle_and_deepcopy() -> None:
    x = numbers(4, 5).to(DEV)
    for again in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        assert again.device == x.device
        same(again, x)
    model = nn.Linear(3, 2).to(DEV)
    twin = copy.deepcopy(model)
    same(twin.weight, model.weight)
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    twin.load_state_dict(nn.Linear(3, 2).state_dict())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    same(torch.load(buffer, weights_only=False).bias, model.bias)


# ---- random numbers --------------------------------------------------------------------------------------


def test_seeds() -> None:
    torch.manual_seed(3)
    first = [torch.rand(5, device=DEV), torch.randn(5, device=DEV), F.dropout(torch.ones(9, device=DEV))]
    host = torch.rand(3)
    torch.manual_seed(3)
    again = [torch.rand(5, device=DEV), torch.randn(5, device=DEV), F.dropout(torch.ones(9, device=DEV))]
    for a, b in zip(first, again):
        same(a, b)
    same(torch.rand(3), host)  # what the device draws leaves the CPU's numbers alone
    assert not torch.equal(torch.rand(5, device=DEV).cpu(), torch.rand(5, device=DEV).cpu())
    torch.flambeau.manual_seed(3)
    same(torch.rand(5, device=DEV), first[0])
    assert torch.flambeau.initial_seed() == 3


def test_states() -> None:
    state = torch.flambeau.get_rng_state()
    a = torch.rand(4, device=DEV)
    torch.flambeau.set_rng_state(state)
    same(torch.rand(4, device=DEV), a)
    with torch.random.fork_rng(devices=[0, 1], device_type=DEV):
        torch.rand(4, device=DEV)
        inside = torch.flambeau.get_rng_state()
    assert not torch.equal(torch.flambeau.get_rng_state(), inside)
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch.flambeau.set_rng_state(state[:8])
    assert len(torch.flambeau.get_rng_state_all()) == 2


def test_generators() -> None:
    g = torch.Generator(device=DEV)
    assert g.device == torch.device("flambeau:0")
    g.manual_seed(5)
    state = g.get_state()
    a = torch.randn(6, device=DEV, generator=g)
    assert g.initial_seed() == 5 and g.get_offset() > 0
    g.set_state(state)
    same(torch.randn(6, device=DEV, generator=g), a)
    twin = g.clone_state()
    same(torch.rand(3, device=DEV, generator=g), torch.rand(3, device=DEV, generator=twin))
    same(torch.randperm(9, device=DEV, generator=g).sort().values, torch.arange(9))


# ---- streams and events ----------------------------------------------------------------------------------


def test_streams() -> None:
    default = torch.flambeau.current_stream()
    assert default.stream_id == 0 and torch.flambeau.default_stream() == default
    s = torch.Stream(device=DEV)
    assert s != default
    with s:
        assert torch.flambeau.current_stream() == s
        x = numbers(64).to(DEV)
    assert torch.flambeau.current_stream() == default
    with torch.flambeau.stream(s):
        same(x + 1, numbers(64) + 1)
    s.synchronize()
    assert s.query()
    default.wait_stream(s)
    torch.accelerator.synchronize()
    other = torch.Stream(device="flambeau:1")
    other.wait_stream(s)
    assert other.device == torch.device("flambeau:1")


def test_events() -> None:
    before, after = torch.Event(device=DEV, enable_timing=True), torch.Event(device=DEV, enable_timing=True)
    assert before.query()
    before.record()
    torch.ones(1 << 20, device=DEV).clone()
    after.record()
    after.synchronize()
    assert after.query() and before.elapsed_time(after) > 0
    s = torch.Stream(device=DEV)
    s.wait_event(after)
    assert s.record_event().query() in (True, False)
    after.record(s)
    after.wait(torch.flambeau.current_stream())
    with pytest.raises(ValueError, match="recorded"):
        before.elapsed_time(torch.Event(device=DEV, enable_timing=True))


def test_streams_have_their_own_memory() -> None:
    s = torch.Stream(device=DEV)
    x = torch.empty(7 << 20, dtype=torch.uint8, device=DEV)
    address = x.data_ptr()
    del x
    with s:
        assert torch.empty(7 << 20, dtype=torch.uint8, device=DEV).data_ptr() != address
    assert torch.empty(7 << 20, dtype=torch.uint8, device=DEV).data_ptr() == address


def test_many_threads() -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for k in range(30):
                c = torch.full((64 + k,), float(seed))
                if not torch.equal((c.to(DEV) * 2).cpu(), c * 2):
                    wrong.append((seed, k))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _in_child(queue: Any) -> None:
    try:
        torch.ones(2, device=DEV)
        queue.put("no error")
    except RuntimeError as error:
        queue.put(str(error))


def test_a_forked_process_is_told() -> None:
    torch.ones(2, device=DEV)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert "forked after OpenCL was used" in queue.get(timeout=60)
    child.join()


# ---- the fallback ----------------------------------------------------------------------------------------


def test_fallbacks_are_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    reset_fallbacks()
    logging.getLogger("flambeau.device.fallback").setLevel(logging.WARNING)
    x = numbers(100).to(DEV)
    assert flambeau.fallbacks() == []
    x.cos()
    assert flambeau.fallbacks() == []
    x.histc(4)
    x.histc(4)
    (row,) = flambeau.fallbacks()
    assert row.operator == "aten::histc" and row.calls == 2 and row.bytes == 2 * 416
    assert [r.getMessage() for r in caplog.records if "aten::histc" in r.getMessage()] == [
        "aten::histc has no kernel on the device and runs on the CPU"]


def test_fallbacks_can_be_forbidden() -> None:
    x = numbers(4).to(DEV)
    with config.override(fallback="error"):
        with pytest.raises(RuntimeError, match="aten::histc: there is no kernel") as error:
            x.histc()
        same(x.abs(), numbers(4).abs())
        assert "[4]" in str(error.value) and "float32" in str(error.value)
        same(x.view(2, 2).t(), numbers(4).view(2, 2).t())  # views and copies need none


def test_out_and_in_place_forms() -> None:
    for device in ("cpu", DEV):
        x = numbers(4, 5).to(device)
        out = torch.empty(0, device=device)
        assert torch.add(x, 1, out=out) is out
        same(out, numbers(4, 5) + 1)
        wide = torch.full((4, 10), 7.0, device=device)
        torch.mul(x, 2, out=wide[:, ::2])
        same(wide[:, ::2], numbers(4, 5) * 2)
        same(wide[:, 1::2], torch.full((4, 5), 7.0))
        assert x.add_(x.t().contiguous().t()) is x
        same(x, numbers(4, 5) * 2)
        values, indices = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
        torch.sort(x, out=(values, indices))
        same(values, (numbers(4, 5) * 2).sort().values)
        a = [numbers(3).to(device), numbers(4).to(device)]
        torch._foreach_add_(a, 1)
        same(a[1], numbers(4) + 1)


def test_results_that_the_cpu_marks_as_conjugated() -> None:
    a, b = numbers(3, 3) + 5 * torch.eye(3) + 1j * numbers(3, 3).t(), numbers(2, 3) + 1j
    factors = torch.linalg.lu_factor(a)
    wanted = torch.linalg.lu_solve(*factors, b, left=False)
    same(torch.linalg.lu_solve(*(t.to(DEV) for t in factors), b.to(DEV), left=False), wanted.resolve_conj())


def test_zeros_without_memory() -> None:
    x = torch.randn(3, device=DEV, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    same(grad, torch.zeros(3))


def test_arguments_that_share_memory() -> None:
    x, c = numbers(10).to(DEV), numbers(10)
    for t in (x, c):
        torch.add(t, t, out=t)
        t[:5].addcmul_(t[:5], t[5:])
        t.index_put_((torch.tensor([1, 3], device=t.device),), t[:2].clone(), accumulate=True)
    same(x, c)


def test_numbers_take_part_as_numbers() -> None:
    for dtype in (torch.float32, torch.int32, torch.float16, torch.bool):
        for shape in ((), (3,)):
            x = numbers(*shape, dtype=dtype)
            for f in (lambda t: t + 2, lambda t: t * 2.5, lambda t: t == 1, lambda t: torch.where(t > 0, t, 0),
                      lambda t: t / 3, lambda t: torch.maximum(t, torch.tensor(1))):
                got, wanted = f(x.to(DEV)), f(x)
                assert got.dtype == wanted.dtype
                same(got, wanted)


def test_indexing() -> None:
    x, c = numbers(5, 6).to(DEV), numbers(5, 6)
    index = torch.tensor([3, 0, 3])
    for f in (lambda t, i: t[i], lambda t, i: t[:, i], lambda t, i: t[t > 0], lambda t, i: t.gather(0, i[:, None]),
              lambda t, i: t.index_select(1, i), lambda t, i: t.nonzero(), lambda t, i: t.unique()):
        same(f(x, index.to(DEV)), f(c, index))
    same(x[index], c[index])
    x[index] = 1
    c[index] = 1
    same(x, c)


@pytest.mark.parametrize("make", [
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                          nn.Linear(36, 3)),
    lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2, groups=1), nn.GroupNorm(3, 3), nn.GELU(), nn.Flatten(),
                          nn.Linear(243, 3)),
], ids=["conv", "transposed"])
def test_a_model_trains(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model).to(DEV)
    x, y = torch.randn(5, 2, 8, 8), torch.tensor([0, 2, 1, 1, 0])
    ours, theirs = ([torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), m] for m in (twin, model))
    for _ in range(3):
        losses = []
        for (optimiser, m), device in ((ours, DEV), (theirs, "cpu")):
            optimiser.zero_grad()
            loss = F.cross_entropy(m(x.to(device)), y.to(device))
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for a, b in zip(twin.parameters(), model.parameters()):
        assert a.grad is not None and a.grad.device.type == DEV
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers(kind: Any, bias: bool) -> None:
    torch.manual_seed(0)
    model = kind(3, 4, num_layers=2, bias=bias)
    twin = copy.deepcopy(model).to(DEV)
    x = torch.randn(5, 2, 3)
    a, b = x.to(DEV).requires_grad_(), x.clone().requires_grad_()
    for m, t in ((twin, a), (model, b)):
        out, state = m(t)
        (out.square().sum() + (state[1] if isinstance(state, tuple) else state).sum()).backward()
    torch.testing.assert_close(a.grad.cpu(), b.grad)
    for p, q in zip(twin.parameters(), model.parameters()):
        torch.testing.assert_close(p.grad.cpu(), q.grad)


def test_attention() -> None:
    q = torch.randn(2, 2, 5, 4)
    a, b = q.to(DEV).requires_grad_(), q.clone().requires_grad_()
    for t in (a, b):
        F.scaled_dot_product_attention(t, t, t, is_causal=True).square().sum().backward()
    torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_a_default_device_and_modes() -> None:
    with torch.device(DEV):
        x = torch.ones(3)
        assert x.device.type == DEV and nn.Linear(2, 2).weight.device.type == DEV
        same(x.abs() + x.to(torch.float64), torch.full((3,), 2, dtype=torch.float64, device="cpu"))
    with torch.inference_mode():
        same(torch.ones(3, device=DEV) * 2, torch.full((3,), 2.0))
