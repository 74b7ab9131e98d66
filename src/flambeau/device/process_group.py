"""torch.distributed on the device: collectives copy through host memory and use gloo.

    torch.distributed.init_process_group("flambeau")     # or "cpu:gloo,flambeau:flambeau"

The inputs of a collective are copied to the host when it is called. Its outputs are copied to the device when gloo is
done, before anyone who waits for them continues. CPU tensors may take part as well. Collectives that only move data
move bytes, so that every dtype is supported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from flambeau.errors import UnsupportedError
from flambeau.torch_compat.distributed import Work, work_from_future

from .torch_module import NAME

dist: Any = torch.distributed  # its stubs lack some names, and names of some versions

PAUSE = 0.1  # seconds

# A tensor, and the host memory that it gets its values from.
Back = tuple[Tensor, Tensor]


class StagedGroup(dist.ProcessGroup):
    """A process group for tensors of the device and of the CPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        kinds = dist.ProcessGroup.BackendType
        for device, kind in (("cpu", kinds.GLOO), (NAME, kinds.CUSTOM)):
            self._register_backend(torch.device(device), kind, self._gloo)
        self._set_default_backend(kinds.GLOO)

    def getBackendName(self) -> str:  # noqa: N802 - as PyTorch calls it
        return NAME

    def shutdown(self) -> None:
        """Shut down gloo. Its threads release what they have sent only after the waiting callers continue, and need the
        interpreter for that: one that still needs it while the process ends would crash it, so wait a little."""
        super().shutdown()
        time.sleep(PAUSE)

    def barrier(self, opts: Any = None) -> Any:
        if (devices := torch.get_device_module(NAME)).is_initialized():
            devices.synchronize()
        return self._gloo.barrier(opts or dist.BarrierOptions())

    # ---- reductions ------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._reduced(self._gloo.allreduce, _several(tensors), opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._reduced(self._gloo.allreduce_coalesced, tensors, opts or dist.AllreduceCoalescedOptions())

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self._reduced(self._gloo.reduce, _several(tensors), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        output, parts = _one(outputs), _one(inputs)
        return self._scattered([(output, torch.cat([_host(t).reshape(-1) for t in parts]))], opts, outputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self._scattered([(output, _host(given).reshape(-1))], opts, output)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        pairs = [(output, _host(given).reshape(-1)) for output, given in zip(outputs, inputs, strict=True)]
        return self._scattered(pairs, opts, outputs)

    def _reduced(self, start: Callable[..., Any], tensors: Sequence[Tensor], opts: Any) -> Any:
        hosts = [_host(t) for t in tensors]
        wanted, divide = self._summed(opts, type(opts)())
        return _after(start(hosts, wanted), _pairs(tensors, hosts), tensors, divide)

    def _scattered(self, pairs: Sequence[Back], opts: Any, result: Any) -> Any:
        """Reduce everything in every process and keep one part, as gloo itself does, but without returning a future."""
        wanted, divide = self._summed(opts or dist.ReduceScatterOptions(), dist.AllreduceCoalescedOptions())
        back = [(output, host.chunk(self.size())[self.rank()].view(output.shape)) for output, host in pairs]
        return _after(self._gloo.allreduce_coalesced([host for _, host in pairs], wanted), back, result, divide)

    def _summed(self, opts: Any, wanted: Any) -> tuple[Any, int]:
        """The options for gloo, and what to divide by afterwards, because gloo does not support averages."""
        if opts.reduceOp == dist.ReduceOp.PREMUL_SUM:
            raise UnsupportedError("a sum with a factor is not one of gloo's reductions", target=NAME,
                                   hint="FSDP: set_force_sum_reduction_for_comms(True)")
        for field in ("reduceOp", "timeout", "rootRank", "rootTensor"):
            if hasattr(wanted, field):
                setattr(wanted, field, getattr(opts, field))
        if opts.reduceOp != dist.ReduceOp.AVG:
            return wanted, 1
        wanted.reduceOp = dist.ReduceOp.SUM
        return wanted, self.size()

    # ---- moving ----------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _several(tensors)
        hosts = [_bytes(_host(t)) for t in tensors]
        return _after(self._gloo.broadcast(hosts, opts or dist.BroadcastOptions()), _pairs(tensors, hosts), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        each, given = _one(outputs), _one(inputs)
        hosts = [_bytes(_room(t)) for t in each]
        work = self._gloo.allgather([hosts], [_bytes(_host(given))], opts or dist.AllgatherOptions())
        return _after(work, _pairs(each, hosts), outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        host = _bytes(_room(output))
        work = self._gloo._allgather_base(host, _bytes(_host(given)), opts or dist.AllgatherOptions())
        return _after(work, _pairs([output], [host]), output)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        hosts = [[_bytes(_room(t)) for t in each] for each in outputs]
        work = self._gloo.allgather_coalesced(hosts, [_bytes(_host(t)) for t in inputs],
                                              opts or dist.AllgatherOptions())
        return _after(work, _pairs(sum(outputs, []), sum(hosts, [])), outputs)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        works = [self._allgather_base(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
        every = torch.futures.collect_all([work.get_future() for work in works])
        return work_from_future(every.then(lambda done: [f.value() for f in done.value()]))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        each = outputs[0] if outputs else []  # empty on ranks that do not receive
        hosts = [_bytes(_room(t)) for t in each]
        work = self._gloo.gather([hosts] if outputs else [], [_bytes(_host(_one(inputs)))], opts)
        return _after(work, _pairs(each, hosts), outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        output = _one(outputs)
        host = _bytes(_room(output))
        work = self._gloo.scatter([host], [[_bytes(_host(t)) for t in each] for each in inputs], opts)
        return _after(work, _pairs([output], [host]), outputs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Exchange tensors as one exchange of bytes with different lengths."""
        hosts, given = [_bytes(_room(t)) for t in outputs], [_bytes(_host(t)) for t in inputs]
        into, split = torch.empty(sum(t.numel() for t in hosts), dtype=torch.uint8), [t.numel() for t in hosts]
        work = self._gloo.alltoall_base(into, torch.cat(given), split, [t.numel() for t in given],
                                        opts or dist.AllToAllOptions())
        return _after(work, _pairs(outputs, into.split(split)), outputs)

    def alltoall_base(self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
                      opts: Any = None) -> Any:
        host, own = _room(output), _host(given)
        rows = [_row_bytes(t) for t in (host, own)]
        bytes_of = [[n * row for n in splits] for splits, row in zip((output_splits, input_splits), rows, strict=True)]
        work = self._gloo.alltoall_base(_bytes(host), _bytes(own), *bytes_of, opts or dist.AllToAllOptions())
        return _after(work, [(output, host)], output)

    # ---- point to point --------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        hosts = [_bytes(_host(t)) for t in tensors]
        return _Sent(self._gloo.send(hosts, to, tag), hosts)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        hosts = [_bytes(_room(t)) for t in tensors]
        return _Sent(self._gloo.recv(hosts, source, tag), hosts, tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        hosts = [_bytes(_room(t)) for t in tensors]
        return _Sent(self._gloo.recv_anysource(hosts, tag), hosts, tensors)

    # Newer names of the same functions.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


# DDP calls collectives while Dynamo watches every frame, but they must not become part of a graph.
for _name, _call in list(vars(StagedGroup).items()):
    if callable(_call) and not _name.startswith("__"):
        setattr(StagedGroup, _name, torch.compiler.disable(_call, reason="a collective"))


class _Sent(Work):
    """A message in transfer. A receiver's tensors get their values in `wait`."""

    def __init__(self, work: Any, hosts: list[Tensor], tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._work = work
        self._hosts = hosts  # gloo does not keep the memory that it sends from alive
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        for tensor, host in _pairs(self._tensors, self._hosts):
            tensor.copy_(host)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def source_rank(self) -> int:
        return int(self._work._source_rank())

    _source_rank = source_rank


# ---- host memory -----------------------------------------------------------------------------------------


def _host(t: Tensor) -> Tensor:
    """A copy of a tensor's values in new host memory."""
    return torch.empty(t.shape, dtype=t.dtype, device="cpu").copy_(t.detach())


def _room(t: Tensor) -> Tensor:
    """Host memory for the new values of a tensor. Waits for work that uses the tensor, so that it can be
    overwritten."""
    if t.device.type == NAME:
        torch.get_device_module(NAME).current_stream(t.device).synchronize()
    return torch.empty(t.shape, dtype=t.dtype, device="cpu")


def _bytes(host: Tensor) -> Tensor:
    return host.reshape(-1).view(torch.uint8)


def _row_bytes(host: Tensor) -> int:
    return host.nbytes // host.shape[0] if host.dim() and host.shape[0] else host.element_size()


def _pairs(tensors: Iterable[Tensor], hosts: Iterable[Tensor]) -> list[Back]:
    """Pair tensors with their values in host memory, which may be stored as bytes."""
    return [(t, host.view(t.dtype).view(t.shape)) for t, host in zip(tensors, hosts)]


def _after(work: Any, back: Sequence[Back], result: Any, divide: int = 1) -> Any:
    """A work that is complete when the results have been copied from the host to their tensors."""

    def done(future: Any) -> Any:
        future.value()  # raises gloo's error
        with torch.no_grad():
            for tensor, host in back:
                tensor.copy_(host / divide if divide > 1 else host)
        return result

    return work_from_future(work.get_future().then(done))


# ---- arguments -------------------------------------------------------------------------------------------


def _several(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _one(values: Sequence[Any]) -> Any:
    """The only element of a list: the interface of collectives still allows for several devices per process."""
    if len(values) != 1:
        raise UnsupportedError(f"{len(values)} tensors of one process take part in a collective, expected 1",
                               target=NAME)
    return values[0]
