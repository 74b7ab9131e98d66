"""What test_device.py runs in a process of its own: the areas of PyTorch's checklist that device_cases.py leaves open.

Two devices with a context each. docs/guides/device.md says which test stands for which area.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.device_interface import get_interface_for_device
from torch.profiler import ProfilerActivity
from torch.utils.dlpack import DLDeviceType, to_dlpack

import flambeau
from two_devices import DEV, quiet, same  # noqa: F401

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    flambeau.enable_device()


# ---- devices and torch.accelerator -----------------------------------------------------------------------


def test_two_devices() -> None:
    assert torch.accelerator.device_count() == 2
    a = torch.arange(6.0, device="flambeau:0")
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
        b = a.to(DEV)
        assert b.device == torch.device("flambeau:1")
        same((b * 2).sum(), torch.tensor(30.0))
        generator = torch.Generator(device=DEV)
        assert generator.device == b.device
        assert torch.randn(3, device=DEV, generator=generator).device == b.device
    assert torch.accelerator.current_device_index() == 0
    same(b.to("flambeau:0"), a)
    before = torch.flambeau.memory_allocated(0), torch.flambeau.memory_allocated(1)
    there = torch.empty(1 << 20, dtype=torch.uint8, device="flambeau:1")
    assert torch.flambeau.memory_allocated(0) == before[0]
    assert torch.flambeau.memory_allocated(1) == before[1] + there.numel()


def test_a_model_on_two_devices() -> None:
    first, second = nn.Linear(4, 5).to("flambeau:0"), nn.Linear(5, 2).to("flambeau:1")
    x = torch.randn(3, 4)
    second(first(x.to("flambeau:0")).to("flambeau:1")).square().sum().backward()
    twins = [copy.deepcopy(m).cpu() for m in (first, second)]
    for twin in twins:
        twin.zero_grad()
    twins[1](twins[0](x)).square().sum().backward()
    for ours, theirs in zip((first, second), twins):
        assert ours.weight.grad is not None and ours.weight.grad.device == ours.weight.device
        torch.testing.assert_close(ours.weight.grad.cpu(), theirs.weight.grad)


@pytest.mark.parametrize("use", [
    lambda: torch.empty(2, device="flambeau:9"), lambda: torch.Stream(device="flambeau:9"),
    lambda: torch.Generator(device="flambeau:9"), lambda: torch.flambeau.set_device(9),
    lambda: torch.flambeau.get_device_name("flambeau:9"), lambda: torch.flambeau.memory_allocated(9),
    lambda: torch.flambeau.synchronize(9), lambda: torch.accelerator.set_device_index(9),
    lambda: nn.Linear(2, 2).to("flambeau:9"), lambda: torch.flambeau.device("flambeau:9"),
])
def test_a_device_that_is_not_there(use: Any) -> None:
    with pytest.raises(RuntimeError, match="flambeau:9 does not exist: there are 2 devices"):
        use()
    assert torch.flambeau.current_device() == 0


def test_the_accelerator() -> None:
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device(DEV)
    stream = torch.Stream(device=DEV)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(before)
    torch.accelerator.synchronize()
    x = torch.empty(1 << 21, dtype=torch.uint8, device=DEV)
    assert torch.accelerator.memory_allocated() >= x.numel()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == torch.accelerator.memory_allocated()
    del x
    torch.accelerator.empty_cache()
    if not OLDER:  # torch.accelerator empties no cache of the host before 2.13
        torch.accelerator.empty_host_cache()
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total


def test_interfaces() -> None:
    """Of what programs and Dynamo ask a device."""
    module = torch.get_device_module(DEV)
    assert module is torch.flambeau and module.is_available() and module.is_initialized()
    assert torch.float32 in module.get_device_capability(1)["supported_dtypes"]
    found = module.get_device_properties("flambeau:1")
    assert found.name == module.get_device_name(1) and found.total_memory > 0 and found.multi_processor_count > 0
    for name in (DEV, "flambeau:1"):
        interface = get_interface_for_device(name)
        assert interface.device_count() == 2 and interface.current_device() == 0 and interface.is_available()
        with interface.device(1):
            assert interface.current_device() == 1 and interface.exchange_device(0) == 1
            assert interface.maybe_exchange_device(-1) == 0
        assert interface.current_stream() == module.current_stream() and interface.is_bf16_supported()
        assert interface.get_raw_stream(0) == module.current_stream().stream_id
        assert interface.get_device_properties(1) == interface.Worker.get_device_properties(1) == found
        interface.synchronize()


def test_modules_and_tensors_have_methods_of_the_device() -> None:
    x = torch.ones(2).flambeau()
    assert x.is_flambeau and not torch.ones(2).is_flambeau and x.untyped_storage().is_flambeau
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).flambeau(1)
    assert {t.device for t in model.state_dict().values()} == {torch.device("flambeau:1")}
    assert x.type() == "torch.flambeau.FloatTensor" and x.to("cpu").type() == "torch.FloatTensor"
    assert nn.Linear(2, 2, device="meta").to_empty(device=DEV).weight.is_flambeau
    assert nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), [3, 2]).to(DEV).data.is_flambeau


# ---- DLPack, other processes -----------------------------------------------------------------------------


def test_dlpack() -> None:
    for device in ("flambeau:0", "flambeau:1"):
        x = torch.arange(20.0).reshape(4, 5).to(device).t()
        assert x.__dlpack_device__() == (DLDeviceType.kDLExtDev, x.device.index)
        for y in (torch.from_dlpack(x), torch.from_dlpack(to_dlpack(x))):
            assert y.device == x.device and y.data_ptr() == x.data_ptr() and y.stride() == x.stride()
            same(y, x)
        copied = torch.from_dlpack(x, copy=True)
        assert copied.device == x.device and copied.data_ptr() != x.data_ptr()
        same(copied, x)
        host = torch.from_dlpack(x, device="cpu")
        assert host.device.type == "cpu"
        same(host, x)
    assert torch.ones(2).__dlpack_device__() == (DLDeviceType.kDLCPU, 0)


def test_dlpack_for_others() -> None:
    x = torch.ones(3, device=DEV)
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(x.clone().requires_grad_())
    with pytest.raises((RuntimeError, BufferError), match="[Uu]nsupported device"):
        np.from_dlpack(x)
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        np.asarray(x)
    assert x.numpy(force=True).tolist() == [1, 1, 1]


def test_memory_is_not_shared_with_other_processes() -> None:
    x = torch.ones(3, device=DEV)
    for value in (x, nn.Parameter(x), x.untyped_storage(), {"state": nn.Linear(2, 2).to(DEV).state_dict()}):
        with pytest.raises(flambeau.UnsupportedError, match="cannot be shared with another process") as error:
            ForkingPickler.dumps(value)
        assert "tensor.cpu()" in str(error.value)
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(torch.ones(2))  # others are as they were
    assert queue.get().tolist() == [1, 1]
    same(pickle.loads(pickle.dumps(x)), x)


# ---- storages, saving ------------------------------------------------------------------------------------


def test_storages() -> None:
    storage = torch.arange(4, dtype=torch.uint8, device=DEV).untyped_storage()
    assert storage.tolist() == [0, 1, 2, 3] and storage.device == torch.device("flambeau:0") and storage.nbytes() == 4
    storage[1] = 9
    twin = storage.clone()
    storage.copy_(torch.zeros(4, dtype=torch.uint8).untyped_storage())
    assert storage.tolist() == [0] * 4 and twin.tolist() == [0, 9, 2, 3]
    assert twin.cpu().tolist() == [0, 9, 2, 3] and twin.cpu().device.type == "cpu"
    where = (DEV,) if OLDER else ()  # storages are pinned for CUDA unless told otherwise, before 2.13
    assert torch.ones(3).untyped_storage().pin_memory(*where).is_pinned(*where)
    x = torch.empty(0, dtype=torch.uint8, device=DEV).set_(twin)
    x[0] = 7
    assert twin.tolist()[0] == 7
    twin.resize_(0)
    assert twin.nbytes() == 0


def test_checkpoints_move_between_devices(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("flambeau:1")
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3, device="flambeau:1")).sum().backward()
    optimiser.step()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, tmp_path / "state.pt")
    for where in (None, "flambeau:0", DEV, "cpu", {"flambeau:1": "cpu"}, lambda storage, tag: storage):
        state = torch.load(tmp_path / "state.pt", map_location=where, weights_only=True)
        expected = "flambeau:1" if where is None else where if isinstance(where, str) else "cpu"
        wanted = torch.device("flambeau:0" if expected == DEV else expected)
        assert state["model"]["0.weight"].device == wanted
        twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(wanted)
        twin.load_state_dict(state["model"])
        again = torch.optim.Adam(twin.parameters())
        again.load_state_dict(state["optimiser"])
        assert again.state[twin[0].weight]["exp_avg"].device == wanted
        for a, b in zip(twin.state_dict().values(), model.state_dict().values()):
            same(a, b)
    with pytest.raises(RuntimeError, match=r"device 7 but torch\.flambeau\.device_count\(\) is 2"):
        torch.load(tmp_path / "state.pt", map_location="flambeau:7")
    mapped = torch.load(tmp_path / "state.pt", map_location="cpu", mmap=True)
    same(mapped["model"]["0.weight"], model[0].weight.detach())


def test_loaders_with_workers() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, pin_memory=True)
    seen = []
    for x, y in loader:
        assert x.is_pinned() and y.is_pinned()
        seen.append((x.to(DEV, non_blocking=True) + 1, y.to(DEV, non_blocking=True)))
    same(torch.cat([x for x, _ in seen]), torch.arange(12.0).reshape(6, 2) + 1)
    same(torch.cat([y for _, y in seen]), torch.arange(6))


# ---- mixed precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 4, device=DEV), torch.randn(4, 3, device=DEV)
    with torch.autocast(DEV, dtype=dtype):
        assert torch.is_autocast_enabled(DEV) and torch.get_autocast_dtype(DEV) == dtype
        assert (a @ b).dtype == dtype and F.linear(a, b.t()).dtype == dtype  # lower
        assert (a @ b).softmax(1).dtype == torch.float32 and (a @ b).exp().dtype == torch.float32  # full
        assert torch.cat([a @ b, a @ b.float()]).dtype == dtype
        assert torch.addcmul(a, a.to(dtype), a).dtype == torch.float32  # the widest
        assert torch.fft.fft(a @ b).dtype == torch.complex64  # as on the CPU: there is no other kernel
        with pytest.raises(RuntimeError, match="unsafe to autocast"):  # as CUDA has it
            F.binary_cross_entropy(a.sigmoid(), a.sigmoid())
        with torch.autocast(DEV, enabled=False):
            assert (a @ b).dtype == torch.float32
            F.binary_cross_entropy(a.sigmoid(), a.sigmoid())
    assert not torch.is_autocast_enabled(DEV) and (a @ b).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_with_a_scaler(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    twin = copy.deepcopy(model).to(DEV)
    losses = []
    for m, device in ((twin, DEV), (model, "cpu")):
        optimiser = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for _ in range(5):
            optimiser.zero_grad()
            with torch.autocast(device, dtype=dtype):
                loss = F.mse_loss(m(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(m.parameters(), 10.0)
            scaler.step(optimiser)
            scaler.update()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_scaler_skips_steps_that_overflow() -> None:
    weight = nn.Parameter(torch.ones(3, device=DEV))
    optimiser = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(DEV, init_scale=4.0, growth_interval=1)
    for factor, expected, scale in ((float("inf"), 1.0, 2.0), (1.0, 0.0, 4.0)):
        optimiser.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimiser)
        scaler.update()
        same(weight.detach(), torch.full((3,), expected))
        assert scaler.get_scale() == scale
    state = scaler.state_dict()
    other = torch.amp.GradScaler(DEV)
    other.load_state_dict(state)
    assert other.get_scale() == scaler.get_scale()


# ---- the profiler ----------------------------------------------------------------------------------------


def test_the_profiler_measures_operators_on_the_device() -> None:
    x = torch.randn(512, 512, device=DEV)  # milliseconds: clocks may be coarse
    with torch.autograd.profiler.profile(use_device=DEV, use_kineto=False) as profile:
        (x @ x).relu()
    # Several rows have one key: torch groups apart those events that took less than a microsecond.
    assert sum(row.device_time_total for row in profile.key_averages() if row.key == "aten::mm") > 0
    assert "FLAMBEAU" in profile.key_averages().table()


def test_traces(tmp_path: Path) -> None:
    if OLDER:
        pytest.skip("torch before 2.13 takes no ranges from devices outside of it")
    x, host = torch.randn(256, 256, device=DEV, requires_grad=True), torch.randn(8)

    def work() -> None:
        (x @ x).t().relu().sum().backward()
        host.sin()

    work()  # kernels are built
    work()  # and gradients added
    activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile, \
            torch.profiler.record_function("my range"):
        work()
        torch.flambeau.synchronize()
    rows = {row.key: row for row in profile.key_averages() if row.device_type == torch.autograd.DeviceType.CPU}
    assert rows["aten::mm"].self_device_time_total > 0 and rows["aten::sum"].self_device_time_total > 0
    assert rows["aten::t"].device_time_total == rows["aten::sin"].device_time_total == 0
    assert "Self FLAMBEAU" in profile.key_averages().table()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    operators = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op"}
    ranges = [e for e in events if e.get("cat") == "kernel"]
    assert {"aten::mm", "aten::relu", "aten::sum", "aten::threshold_backward"} <= {e["name"] for e in ranges}
    assert not {"aten::t", "aten::matmul", "aten::sin", "aten::empty"} & {e["name"] for e in ranges}
    for r in ranges:  # each of its operator, one after the other, about when it was called
        assert operators[r["args"]["External id"]]["name"] == r["name"] and r["dur"] >= 0
        assert abs(r["ts"] - operators[r["args"]["External id"]]["ts"]) < 5e6
    order = sorted(ranges, key=lambda r: r["ts"])
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in zip(order, order[1:]))
    assert any(e.get("name") == "my range" for e in events)


def test_kernels_after_a_graph_break_are_not_traced() -> None:
    """Dynamo goes on watching: it would run the compiler of the next kernel on tensors that are not there."""
    x = torch.tensor([True, False, True], device=DEV)
    compiled = torch.compile(lambda x: x[x].clone(), backend="flambeau")
    assert compiled(x).cpu().tolist() == [True, True]
