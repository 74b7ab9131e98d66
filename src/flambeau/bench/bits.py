"""Counts values that differ from eager's with `numerics="eager"`: single operators, chains, large shapes, optimizers.

    tasks("tiny", "cpu")[0].run()        # [Finding("alone", "abs float32", values=..., unequal=0), ...]

Where eager does not repeat itself, torch's deterministic kernels judge; if there are none, the finding says so.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.bench.bits_cases import ALONE, large, values
from flambeau.bench.chains import chain, inputs_of
from flambeau.bench.harness import UNSTEADY, message, wanted
from flambeau.bench.parts import OutOfTime, Talk
from flambeau.bench.random_networks import draw as draw_network
from flambeau.compare.differences import difference
from flambeau.debug import collect
from flambeau.pipeline import Options, compiled
from flambeau.testing.one_order import one_order, warned
from flambeau.torch_compat import pytree
from flambeau.torch_compat.ops import foreach_lerp_

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT: dict[str, Any] = {"backend": "flambeau", "options": {"numerics": "eager"}}
# Values of a distribution, values of a chain, number of chains, samples of an entry, number of networks.
SIZES = {"large": (1 << 18, 1 << 16, 670, 2, 500), "tiny": (1 << 8, 257, 10, 1, 6)}
LOST = "CUDA error"  # a CUDA context is unusable after it
AT_ONCE = {"alone": 8, "chains": 10}  # kernels that one compiler process builds

# Entries that test few or no kernels of ours; other entries to treat as pointwise; entries to check first.
LEFT_OUT = ("linalg", "fft", "svd", "eig", "lu", "sparse", "jiterator", "stft", "cholesky", "ormqr", "lobpcg", "masked",
            "empty", "matrix_exp", "pca")
ALSO_POINTWISE = ("lerp", "addcmul", "addcdiv", "where", "clamp", "silu", "gelu", "glu", "logsigmoid", "prelu")
FIRST = ("sum", "mean", "var", "std", "softmax", "norm", "loss", "entropy", "pool", "embedding", "cum", "prod",
         "dropout", "rand", "bernoulli", "normal", "exponential", "conv", "linear", "mm", "attention")

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"weight_decay": 0.1}), ("Adam", {"amsgrad": True}), ("AdamW", {}), ("NAdam", {}), ("RAdam", {}),
    ("Adamax", {}), ("Adagrad", {}), ("Adadelta", {}), ("RMSprop", {"momentum": 0.5}), ("RMSprop", {"centered": True}),
    ("ASGD", {}), ("Rprop", {})]
FORMS: dict[str, dict[str, Any]] = {"default": {}, "single": {"foreach": False}, "foreach": {"foreach": True},
                                    "fused": {"fused": True}}
SCALED = torch.float16  # float32 parameters under autocast, with a GradScaler: it takes no gradients in half precision
SHAPES = ((1,), (3, 5), (257, 129), (1024, 64))
STEPS, OVERFLOW = 5, 2  # OVERFLOW: the step whose gradients are infinite, if they are scaled


@dataclass
class Finding:
    group: str
    name: str
    values: int = 0
    unequal: int = 0
    note: str = ""
    error: str = ""


@dataclass
class Task:
    group: str
    name: str
    run: Callable[[], list[Finding]]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def found(group: str, name: str, ours: Sequence[Any], eager: Sequence[Any]) -> Finding:
    """Counts the values that differ between two lists of tensors."""
    rows = [difference(f"result {k}", a, b) for k, (a, b) in enumerate(zip(eager, ours, strict=True))]
    off = [f"{r.name}: {r.note or f'{r.differ} of {r.total}, {r.max_ulps} ulps'}" for r in rows if not r.equal]
    return Finding(group, name, sum(r.total for r in rows), sum(r.differ for r in rows), "; ".join(off[:3]))


# ---- without Dynamo ------------------------------------------------------------------------------------------


def check_built(group: str, cases: Iterable[tuple[str, Callable[..., list[Tensor]], Sequence[Tensor]]]
                ) -> list[Finding]:
    """Compiles each function of tensors as a graph of its own, all of them together; a failure is a finding too."""
    made: list[tuple[str, Callable[..., list[Tensor]], Sequence[Tensor], Any]] = []
    out: list[Finding] = []

    @contextmanager
    def attempt(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            out.append(Finding(group, name, error=message(error)))

    for name, call, inputs in cases:
        with attempt(name):
            made.append((name, call, inputs, compiled(make_fx(call)(*inputs), Options("eager"))))
    for name, call, inputs, ours in made:
        with attempt(name):
            out.append(found(group, name, ours.finish()(list(inputs)), call(*inputs)))
    return out


def check_alone(dtype: torch.dtype, names: Sequence[str], count: int, device: str) -> list[Finding]:
    def alone(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
        return lambda *tensors: [function(*tensors)]

    inputs = values(dtype, count, device)
    return check_built("alone", [(f"{name} {short(dtype)}", alone(ALONE[name]), inputs) for name in names])


def check_chains(dtype: torch.dtype, seeds: range, count: int, device: str) -> list[Finding]:
    return check_built("chains", [(f"{short(dtype)}: {names}", run, inputs_of(seed, dtype, device, count))
                                  for seed in seeds for names, run in [chain(seed)]])


def check_entry(name: str, dtype: torch.dtype, samples: int, device: str) -> list[Finding]:
    from flambeau.testing.opinfo import OPS, check_opinfo  # takes seconds

    def check() -> Any:
        return check_opinfo(name, dtype, limit=samples, numerics="eager", device=device)

    if dtype not in OPS[name].supported_dtypes(device):
        return []
    report = check()
    out = Finding("entries", f"{name} {short(dtype)}", report.values, report.unequal)
    if any("run to run" in reason for reason in report.skipped):
        out.note = UNSTEADY
    if report.unequal:
        with one_order():
            ordered = check()
        if not ordered.unequal and not ordered.failures:
            out.unequal, out.note = 0, UNSTEADY
            return [out]
    if report.failures:
        if broken := [text for text in report.failures if LOST in text]:
            raise RuntimeError(broken[0][broken[0].index(LOST):])
        text = report.failures[0].replace("\n", " ")[-200:]
        out.note, out.error = (text, "") if report.unequal else ("", text)
    return [out]


# ---- with Dynamo ---------------------------------------------------------------------------------------------


def exactly(function: Any) -> Any:
    return torch.compile(function, **EXACT)


@contextmanager
def compiling() -> Iterator[None]:
    """Raises an error if nothing was compiled in the block: comparing eager with itself proves nothing."""
    torch.compiler.reset()
    with collect() as graphs:
        yield
    if not graphs:
        raise AssertionError("nothing was compiled")


def check_large(name: str, dtype: torch.dtype, size: str, device: str) -> list[Finding]:
    function, shapes = large(device, size)[name]
    draw = torch.Generator().manual_seed(11)
    leaves = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]

    def call(*inputs: Tensor) -> Any:
        return function(*inputs)

    def evaluate(by: Callable[[Any], Any]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in leaves]
        return with_gradients(by(call)(*inputs), inputs)

    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        return beside_eager(Finding("large", f"{name} {short(dtype)}"), evaluate)


def check_network(seed: int, dtype: torch.dtype, size: str, device: str) -> list[Finding]:
    """Compares a random network: its result, the gradients of its input and parameters, and its buffers."""
    network, x = draw_network(seed, size)
    network, x = network.to(device, dtype), x.to(device, dtype)

    def evaluate(by: Callable[[Any], Any]) -> list[Tensor]:
        module, given = copy.deepcopy(network), x.clone().requires_grad_()
        made = with_gradients(by(module)(given), [given, *module.parameters()])
        return [*made, *(b.float() for b in module.buffers())]

    return beside_eager(Finding("networks", f"{seed} {short(dtype)}: {network.title}"), evaluate)


def with_gradients(results: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors among the results, and the gradients of a weighted sum of them."""
    tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    smooth = [t for t in tensors if t.requires_grad]
    weights = [torch.linspace(-1, 1, t.numel(), device=t.device).to(t.dtype).view(t.shape) for t in smooth]
    gradients = torch.autograd.grad(smooth, leaves, weights, allow_unused=True) if smooth else ()
    return [t.detach() for t in tensors] + [t for t in gradients if t is not None]


def beside_eager(case: Finding, evaluate: Callable[[Callable[[Any], Any]], list[Tensor]]) -> list[Finding]:
    """Compares with eager; if eager itself is not reproducible, with deterministic kernels, if torch has them."""

    def eager() -> list[Tensor]:
        torch.manual_seed(4)
        return evaluate(lambda call: call)

    def both() -> Finding:
        theirs = eager()
        with compiling():
            torch.manual_seed(4)
            return found(case.group, case.name, evaluate(exactly), theirs)

    try:
        out = both()
    except NotImplementedError:  # raised by torch, for this dtype
        return []
    if out.unequal:
        plain, (ordered, refused) = eager(), warned(eager)
        if refused or any(found("", "", again, plain).unequal for again in (ordered, eager(), eager())):
            out, refused = warned(both)
            # Some kernels add in any order, although torch does not list them as nondeterministic.
            if refused or not out.unequal or found("", "", warned(eager)[0], ordered).unequal:
                out.unequal, out.note = 0, UNSTEADY
    return [out]


def check_optimizer(kind: str, options: dict[str, Any], form: str, dtype: torch.dtype, device: str) -> list[Finding]:
    """Compares parameters, state, averages (and the scale) after steps with clipping, each form with the same in
    eager."""
    make = partial(getattr(torch.optim, kind), **options, **FORMS[form])
    run = partial(scaled_steps if dtype is SCALED else plain_steps, make, dtype, device)
    try:
        eager = run(lambda f: f)
    except RuntimeError as error:
        if form in str(error):  # torch has the form only on other devices
            return []
        raise
    with compiling():
        ours = run(exactly)
    out = found("optimizers", optimizer_name(kind, options, form, dtype), ours, eager)
    if out.unequal and found("", "", run(lambda f: f), eager).unequal:
        out.unequal, out.note = 0, UNSTEADY
    return [out]


def optimizer_name(kind: str, options: dict[str, Any], form: str, dtype: torch.dtype) -> str:
    words = [f"{key} {value}" for key, value in options.items() if key != "lr"]
    return " ".join([kind, *words, form, "float16 scaled" if dtype is SCALED else short(dtype)])


def follow(averages: list[Tensor], tensors: list[Tensor]) -> None:
    foreach_lerp_(averages, tensors, 0.1)


def plain_steps(make: Any, dtype: torch.dtype, device: str, by: Callable[[Any], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]
    optimizer, averages = make(parameters), [p.detach().clone() for p in parameters]
    step, clip, average = by(optimizer.step), by(nn.utils.clip_grad_norm_), by(follow)
    for _ in range(STEPS):
        for p in parameters:
            p.grad = torch.randn(p.shape).to(p)
        clip(parameters, 1.0)
        step()
        average(averages, [p.detach() for p in parameters])
    return [*parameters, *states(optimizer), *averages]


def scaled_steps(make: Any, dtype: torch.dtype, device: str, by: Callable[[Any], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    x, parameters = torch.randn(32, 64).to(device), list(model.parameters())
    optimizer, scaler = make(parameters), torch.amp.GradScaler(device, init_scale=2.0**12)
    averages = [p.detach().clone() for p in parameters]
    optimizer.step = by(optimizer.step)
    call, clip, average = by(model), by(nn.utils.clip_grad_norm_), by(follow)
    for k in range(STEPS):
        with torch.autocast(device, dtype):
            loss = call(x * (1e6 if k == OVERFLOW else 1)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average(averages, [p.detach() for p in parameters])
    return [*parameters, *states(optimizer), *averages, torch.tensor(scaler.get_scale())]


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the state, moved to the CPU: which device has the step counts depends on the form of the optimizer."""
    return [t.cpu() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


# ---- all of them ---------------------------------------------------------------------------------------------


def entry_names() -> tuple[list[str], list[str]]:
    """Returns pointwise entries, and the others, the most important first."""
    from flambeau.testing.opinfo import OPS
    from flambeau.torch_compat.testing import BinaryUfuncInfo, UnaryUfuncInfo

    pointwise = [name for name, op in OPS.items() if isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo))
                 or any(word in name for word in ALSO_POINTWISE)]
    others = [name for name in OPS if name not in set(pointwise) and not any(word in name for word in LEFT_OUT)]
    return pointwise, sorted(others, key=lambda name: not any(word in name for word in FIRST))


def tasks(size: str, device: str, seed: int = 0) -> list[Task]:
    """Returns the tasks in their order: single operators first, then some of each kind, so that all kinds are covered
    whenever the time is over. The seed is that of the first network."""
    count, length, chains, samples, networks = SIZES[size]
    names, (pointwise, others) = list(ALONE), entry_names()
    half = DTYPES[:2]

    def batches(total: int, group: str) -> Iterator[range]:
        for start in range(0, total, AT_ONCE[group]):
            yield range(start, min(start + AT_ONCE[group], total))

    first = [Task("alone", f"{short(d)} {' '.join(batch)}", partial(check_alone, d, batch, count, device))
             for r in batches(len(names), "alone") for d in DTYPES for batch in [names[r.start:r.stop]]]
    entries = [Task("entries", f"{name} {short(d)}", partial(check_entry, name, d, samples, device))
               for name, d in [*product(pointwise, DTYPES), *((name, d) for d in half for name in others)]]
    queues = {  # by the number of tasks that are done in a round
        1: [Task("large", f"{name} {short(d)}", partial(check_large, name, d, size, device))
            for name, d in product(large("meta", "tiny"), half)],
        2: [Task("chains", f"{short(d)} {r.start}", partial(check_chains, d, shifted(r, k), length, device))
            for r in batches(chains, "chains") for k, d in enumerate(DTYPES)],
        3: [Task("optimizers", optimizer_name(*case), partial(check_optimizer, *case, device))
            for (kind, options), form, d in product(OPTIMIZERS, FORMS, DTYPES) for case in [(kind, options, form, d)]
            if form != "fused" or "fused" in inspect.signature(getattr(torch.optim, kind)).parameters],
        4: [Task("networks", f"{n} {short(d)}", partial(check_network, n, d, size, device))
            for k, n in enumerate(range(seed, seed + networks)) for d in [DTYPES[k % len(DTYPES)]]],
        9: entries}
    out = list(first)
    while any(queues.values()):
        for share, queue in queues.items():
            out += queue[:share]
            del queue[:share]
    return out


def shifted(seeds: range, k: int) -> range:
    return range(1000 * k + seeds.start, 1000 * k + seeds.stop)


def part(talk: Talk, size: str, device: str, only: str | None, claims: str, seed: int) -> None:
    """Does tasks that no other process has claimed, until the time is over."""
    torch.set_num_threads(1)
    todo = [task for task in tasks(size, device, seed) if wanted(f"{task.group} {task.name}", only)]
    groups = [task.group for task in todo]
    talk.tell(planned={group: groups.count(group) for group in groups})
    for number, task in enumerate(todo):
        if talk.left() <= 0:
            break
        try:
            (Path(claims) / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            with talk.within(talk.left()):
                findings = task.run()
        except OutOfTime:
            break
        except Exception as error:
            findings = [Finding(task.group, task.name, error=message(error))]
        talk.tell(done=task.group, found=[asdict(f) for f in findings])
        if any(LOST in f.error for f in findings):
            break
