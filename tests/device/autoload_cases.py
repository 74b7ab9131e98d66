"""What test_autoload.py starts once: each case in a process of its own, forked from one that has imported torch."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def a_compiled_step_asks_for_it() -> None:
    """Dynamo is at work when the optimizer asks whether there is an accelerator."""
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.ones(3)
    step = torch.compile(torch.optim.AdamW([x], lr=0.1).step, backend="flambeau")
    for _ in range(2):
        step()
    assert not torch.flambeau.is_initialized() and x.detach().lt(0.9).all()


def the_first_use_starts_the_device() -> None:
    assert not {"pyopencl", "flambeau.device.enable", "flambeau.targets.base"} & set(sys.modules)
    assert torch.device("flambeau", 1).type == "flambeau" and not torch.flambeau.is_initialized()
    torch.manual_seed(11)
    x = torch.ones(3, requires_grad=True)
    torch.optim.SGD([x]).step()  # asks whether an accelerator is available
    assert torch.flambeau.device_count() >= 1 and torch.flambeau.is_available()
    assert not torch.accelerator.is_available()  # just the CPU: nothing to recommend
    assert torch.accelerator.current_accelerator() is None and torch.accelerator.device_count() == 0
    assert not torch.flambeau.is_initialized()
    assert torch.ones(2, device="flambeau").add(1).cpu().tolist() == [2, 2]
    assert torch.flambeau.is_initialized() and torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.flambeau.device_count()
    assert "supported_dtypes" in torch.flambeau.get_device_capability()
    assert torch.flambeau.initial_seed() == 11  # the seed came before the device


def an_accelerator_is_recommended() -> None:
    from flambeau.device import enable as device

    device.found = lambda: device.Found(1, True)  # type: ignore[assignment]
    assert torch.accelerator.is_available() and torch._C._get_accelerator() == torch.device("flambeau")
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
    assert not torch.flambeau.is_initialized()
    assert all(batch.is_pinned() for batch in loader)  # PyTorch pins without starting a device
    assert torch.flambeau.is_initialized() and "pin_memory" not in torch.Tensor.__dict__


def accelerate() -> None:
    """A package that asks as Hugging Face's does, in a folder on the path."""
    folder = Path(tempfile.mkdtemp()) / "accelerate" / "utils"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text("from .modeling import get_max_memory\n")
    (folder / "modeling.py").write_text("def get_max_memory(given=None):\n    return given or {'cpu': 1}\n")
    sys.path.insert(0, str(folder.parents[1]))


def hugging_face_takes_what_is_in_use() -> None:
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    accelerate()
    from accelerate.utils import get_max_memory
    assert get_max_memory() == {"cpu": 1} and "ACCELERATE_TORCH_DEVICE" not in os.environ  # just the CPU
    torch.ones(2, device="flambeau")
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "flambeau"
    assert [*get_max_memory()] == [*range(torch.accelerator.device_count()), "cpu"] and get_max_memory()[0] > 2**20
    assert get_max_memory({"cpu": 5}) == {"cpu": 5}


def hugging_face_takes_what_is_asked_for() -> None:
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    os.environ["FLAMBEAU_DEVICE"] = "opencl"
    accelerate()
    from accelerate.utils import modeling
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "flambeau" and torch.accelerator.is_available()
    assert not torch.flambeau.is_initialized()
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)
    assert 0 in modeling.get_max_memory()


def programs_do_not_mean_it() -> None:
    for backend in ("gloo", None):
        where = f"file://{tempfile.mkdtemp()}/rendezvous"
        dist.init_process_group(backend, init_method=where, rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(3, 2)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
    with torch.profiler.profile(acc_events=True):
        assert not torch.ones(3).is_pinned()
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
    assert torch.get_device_module() is torch.cpu
    assert not torch.flambeau.is_initialized()
    ours = torch._C._get_accelerator
    torch.ones(2, device="flambeau")
    assert torch._C._get_accelerator is not ours and torch._C._get_accelerator() == torch.device("flambeau")
    assert torch.ones(2).pin_memory().is_pinned()


def starts(use: Callable[[], object]) -> Callable[[], None]:
    def case() -> None:
        use()
        assert torch.flambeau.is_initialized()
        assert torch.randn(2, device="flambeau", generator=torch.Generator(device="flambeau")).shape == (2,)

    return case


def load() -> object:
    torch.save(torch.ones(2), file := io.BytesIO())
    file.seek(0)
    return torch.load(file, map_location="flambeau")


def a_fork_after_a_look_at_the_devices() -> None:
    assert torch.flambeau.device_count() >= 1
    if not (child := os.fork()):
        try:
            torch.ones(2, device="flambeau")
        except RuntimeError as error:
            os._exit(int("forked after OpenCL was used" not in str(error) or "spawn" not in str(error)))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def there_is_no_pyopencl() -> None:
    sys.modules["pyopencl"] = None  # type: ignore[assignment]
    import flambeau

    assert not torch.accelerator.is_available() and torch.flambeau.device_count() == 0
    assert not torch.flambeau.is_available()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(torch.utils.data.DataLoader(torch.arange(4.0), pin_memory=True))) == 4
    assert any("no accelerator is found" in str(w.message) for w in said)
    with torch.profiler.profile(acc_events=True):
        torch.ones(2).sum()
    for use in (lambda: torch.ones(2).to("flambeau"), lambda: torch.flambeau.Stream("flambeau")):
        try:
            use()
        except flambeau.UnsupportedError as error:
            assert "PyOpenCL cannot be imported" in str(error) and "pip install 'flambeau[opencl]'" in str(error)
        else:
            raise AssertionError("no error")


def there_is_no_compiler() -> None:
    os.environ |= {"FLAMBEAU_CXX": "no-such-compiler", "FLAMBEAU_CACHE_DIR": tempfile.mkdtemp()}
    import flambeau

    assert torch.flambeau.device_count() == 0 and not torch.flambeau.is_available()
    try:
        torch.ones(2).to("flambeau")
    except flambeau.CompileError as error:
        assert "no-such-compiler" in str(error)
    else:
        raise AssertionError("no error")
    assert torch.ones(2).sum().item() == 2


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case for case in (
        the_first_use_starts_the_device, an_accelerator_is_recommended, programs_do_not_mean_it,
        a_fork_after_a_look_at_the_devices, there_is_no_pyopencl, there_is_no_compiler, a_compiled_step_asks_for_it,
        hugging_face_takes_what_is_in_use, hugging_face_takes_what_is_asked_for)
} | {
    "a_stream_starts_it": starts(lambda: torch.flambeau.Stream("flambeau")),
    "loading_starts_it": starts(load),
}


def main() -> None:
    for name, case in CASES.items():
        print("case", name, flush=True)
        if not (child := os.fork()):
            try:
                case()
                print("passed", flush=True)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
