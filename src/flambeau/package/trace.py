"""Traces the methods of a package with torch.export, with names, ranges and nested arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from flambeau.capture.decompositions import table
from flambeau.capture.eager_strides import settle_strides
from flambeau.capture.kept_whole import whole_operators
from flambeau.errors import UnsupportedError
from flambeau.ir.program import Program
from flambeau.torch_compat.exported import decomposed
from flambeau.torch_compat.pytree import tree_flatten_with_path, tree_map

from .container import text_words
from .plan import DTYPES, INPUT, MOST_RANK, WEIGHT, Role, direct_outputs
from .results import numbers_as_tensors, structure_of
from .weights import Weights

aten = torch.ops.aten
GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)
MOST = 1 << 40  # stands for the upper bound of an unbounded size
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


@dataclass(frozen=True)
class Port:
    """An input or output of a method, as the index stores it."""

    name: str
    dtype: torch.dtype
    type: str
    ranges: tuple[tuple[int, int], ...] = ()
    rank: int = 0

    def words(self) -> list[int]:
        return [*text_words(self.name), *text_words(self.type), DTYPES[self.dtype], self.rank,
                *(x for pair in self.ranges for x in pair)]


@dataclass
class Method:
    name: str
    graph: fx.GraphModule
    inputs: list[Port]
    outputs: list[Port]
    roles: list[Role]
    structure: dict[str, Any]  # of arguments and results, for Python
    programs: dict[str, list[int]] = field(default_factory=dict)  # words, by target
    plain: dict[str, bytes] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class Wrapped(torch.nn.Module):
    """Wraps a function in a module. A bound method of a module registers that module, so its weights keep their names
    (under `owner.`)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self.owner = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class TrainStep:
    """A method of a package that returns what the function returns, and then its gradients, by parameter name.

        flambeau.export(model, (x,), "model.flam", methods={"step": (flambeau.TrainStep(model.loss), (x, y))})

    The function is a module or a method of one. It returns a loss of one number, or a tuple that begins with it."""

    function: Any


class WithLoss(Wrapped):
    """Wraps a function whose first result is the loss; the other results are detached."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return out
        return (out[0], *tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tuple(out[1:])))


def exported(name: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any,
             exact: bool) -> tuple[ExportedProgram, Any, str]:
    """Exports a function with torch.export and decomposes it. Returns the program, the nesting of its results, and the
    prefix that precedes the module's own names of weights."""
    trains = isinstance(function, TrainStep)
    function = function.function if trains else function
    # torch would make one input of a tensor that is given twice, and none of a parameter: detach gives each its own.
    args, kwargs = tree_map(lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x,
                            (args, dict(kwargs)))
    if isinstance(function, ExportedProgram):
        module: Any = function
    elif trains:
        module = WithLoss(function.__call__ if isinstance(function, torch.nn.Module) else function)
    else:
        module = function if isinstance(function, torch.nn.Module) else Wrapped(function)
    shapes = dynamic_shapes
    if isinstance(module, Wrapped) and shapes is not None:
        by_name = shapes if isinstance(shapes, Mapping) else dict(zip(parameters(function), shapes))
        shapes = {"args": tuple(by_name.get(p) for p in parameters(function)[: len(args)])}
        shapes |= {"kwargs": {k: by_name.get(k) for k in kwargs}} if kwargs else {}
    with torch.set_grad_enabled(trains), whole_operators(exact):
        found = module if isinstance(module, ExportedProgram) else torch.export.export(
            module, args, kwargs, dynamic_shapes=shapes, strict=False)
        for n in found.graph.nodes if trains else ():  # parameters that a step does not use have no gradients
            if n.op == "placeholder" and not n.users and isinstance(n.meta.get("val"), torch.Tensor):
                n.meta["val"] = n.meta["val"].detach()
        try:
            made = decomposed(found, table(exact), trains)
        except (AssertionError, RuntimeError) as e:
            said = "torch finds no gradients of this step" if trains else "torch does not take apart what it exported"
            raise UnsupportedError(f"{name}: {said}: {e}", hint=(
                "its first result is a loss of one number that depends on all parameters which it uses; what is given "
                "is a module, or a method of one") if trains else (
                "give what torch.export.export(model, args, strict=True) returns instead of the model")) from e
    return made, found.call_spec.out_spec, "owner." if isinstance(module, Wrapped) else ""


def traced(name: str, weights: Weights, exact: bool, function: Any, args: tuple[Any, ...] = (),
           dynamic_shapes: Any = None, kwargs: Mapping[str, Any] | None = None) -> Method:
    if isinstance(function, ExportedProgram):
        args, kwargs = function.example_inputs or ((), {})
    given = tuple(args), dict(kwargs or {})
    found, nesting, prefix = exported(name, function, *given, dynamic_shapes, exact)
    gm, signature = found.graph_module, found.graph_signature
    for n in reversed(gm.graph.nodes):  # torch's assertions about inputs: the runtime checks them
        if getattr(n.target, "__name__", "").startswith(("_assert_", "sym_constrain_range")) and not n.users:
            gm.graph.erase_node(n)
    serve_all_sizes(gm, found.range_constraints)
    call_in_order(gm.graph)
    nodes = {n.name: n for n in gm.graph.nodes}
    written = {s.target for s in signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION}
    roles: list[Role] = []
    inputs: list[Port] = []
    shown: dict[str, str] = {}  # the user's name for each symbol of torch
    said, names, dims = argument_names(*given, function, dynamic_shapes)
    for spec, place in zip(signature.input_specs, [n for n in gm.graph.nodes if n.op == "placeholder"], strict=True):
        val = place.meta.get("val")
        if spec.kind is InputKind.USER_INPUT and not isinstance(val, torch.Tensor):
            if isinstance(val, torch.SymInt | torch.SymFloat):
                raise UnsupportedError(f"{name}: the number {place.name} is not always the same: give a tensor")
            roles.append(Role(-1, 0))
        elif spec.kind is InputKind.USER_INPUT:
            roles.append(Role(INPUT, len(inputs)))
            inputs.append(port(names[len(inputs)], val, dims[len(inputs)], shown))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            value = found.constants[spec.target] if spec.target in found.constants else found.state_dict[spec.target]
            which = weights.add(spec.target.removeprefix(prefix), value.detach(), spec.target in written)
            roles.append(Role(WEIGHT, which))
        elif spec.kind is InputKind.TOKEN:
            roles.append(Role(-1, 0))
        else:
            raise UnsupportedError(f"{name}: packages cannot hold the input {spec.arg.name}, a {spec.kind.name}")
    write_buffers(name, gm, signature, nodes, names)
    numbers_as_tensors(gm)
    results = gm.graph.output_node().args[0]
    assert isinstance(results, list | tuple)
    gradients = [s.target.removeprefix(prefix) for s in signature.output_specs if s.kind in GRADIENTS]
    out = structure_of(nesting, results[:len(results) - len(gradients)])
    settle_strides(gm.graph, names_only=False)
    drop_numbers(gm, roles)
    tensors: Any = gm.graph.output_node().args[0]
    outputs = [output(k, r) for k, r in enumerate(tensors)]
    if gradients:
        of = {"dict": {g: {"output": len(outputs) - len(gradients) + k} for k, g in enumerate(gradients)}}
        out = {"tuple": [*out.get("tuple", [out]), of]}
    structure = {"in": said, "out": out}
    return Method(name, gm, inputs, outputs, [r for r in roles if r.place >= 0], structure)


def refused(missing: dict[str, list[str]]) -> UnsupportedError:
    each = "; ".join(f"{', '.join(ops)} (in {name})" for name, ops in missing.items())
    return UnsupportedError(f"these operators have no kernels of Flambeau's, and a package has no others: {each}",
                            hint="write them with others, leave them outside of the exported model, or export with "
                            "torch_operators=True for CPUs with torch")


def copied_results(gm: fx.GraphModule, program: Program) -> fx.GraphModule | None:
    """The graph with a copy of each result that a kernel does not write directly (see `direct_outputs`): one that
    shares memory, or is strided. Returns None if no copy is missing."""
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    direct = direct_outputs(program)
    shared = [k for k, node in enumerate(results) if k not in direct and not is_copy(node)]
    if not shared:
        return None
    new = fx.GraphModule(gm, fx.Graph())
    new.graph.output(new.graph.graph_copy(gm.graph, {}))
    out = new.graph.output_node()
    found = list(out.args[0])  # type: ignore[arg-type]
    for k in shared:
        node: fx.Node = found[k]
        with new.graph.inserting_before(out):
            found[k] = new.graph.call_function(aten.clone.default, (node,))
        found[k].meta["val"] = results[k].meta["val"].clone()
    out.args = (tuple(found),)
    new.recompile()
    return new


def is_copy(node: fx.Node) -> bool:
    return node.target is aten.clone.default


def call_in_order(graph: fx.Graph) -> None:
    """Replaces operators with effects, which torch orders by passing a token from one to the next, with plain calls:
    the list of steps keeps their order."""
    for node in list(graph.nodes):
        if "with_effects" not in str(node.target):
            continue
        token, operator, *args = node.args
        with graph.inserting_before(node):
            call = graph.call_function(operator, tuple(args), node.kwargs)
        made = node.meta["val"][1:]
        call.meta = {**node.meta, "val": made[0] if len(made) == 1 else made}
        for user in list(node.users):
            k = user.args[1]
            if k == 0 or len(made) == 1:
                user.replace_all_uses_with(token if k == 0 else call)
                graph.erase_node(user)
            else:
                user.args = (call, k - 1)
        graph.erase_node(node)


def serve_all_sizes(gm: fx.GraphModule, ranges: Mapping[Any, Any]) -> None:
    """Widens the ranges of symbolic sizes to those requested. torch traces as if sizes were at least two, but promises
    that the graph holds for the whole range, so kernels must not rely on the two."""
    vals = (n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder")
    sizes: list[Any] = [s for v in vals if isinstance(v, torch.Tensor) for s in v.shape]
    for size in (s for s in sizes if isinstance(s, torch.SymInt)):
        known = size.node.shape_env.var_to_range
        known.update({s: ranges[s] for s in size.node.expr.free_symbols if s in ranges and s in known})


def drop_numbers(gm: fx.GraphModule, roles: list[Role]) -> None:
    """Removes arguments and results that are not tensors: numbers given to the trace are constants of the graph, and
    constant results are part of the structure."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for place, role in zip(places, roles, strict=True):
        if role.place < 0:
            place.replace_all_uses_with(place.meta.get("val"))
            gm.graph.erase_node(place)
    out = gm.graph.output_node()
    out.args = (tuple(r for r in out.args[0] if isinstance(r, fx.Node)),)  # type: ignore[union-attr]
    gm.recompile()


def write_buffers(name: str, gm: fx.GraphModule, signature: Any, nodes: dict[str, fx.Node], inputs: list[str]) -> None:
    """Writes the new values of buffers, which torch.export returns as results, back with `copy_`, as captured graphs
    do. `inputs`: the names of the method's tensor inputs."""
    out = gm.graph.output_node()
    results = list(out.args[0])  # type: ignore[arg-type]
    place_of = {s.target: nodes[s.arg.name] for s in signature.input_specs if s.target}
    left = []
    for spec, result in zip(signature.output_specs, results, strict=True):
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT, *GRADIENTS):
            left.append(result)
        elif spec.kind is OutputKind.TOKEN:
            continue
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            place = place_of[spec.target]
            with gm.graph.inserting_before(out):
                copy = gm.graph.call_function(aten.copy_.default, (place, result))
            copy.meta["val"] = place.meta["val"]
        else:
            given = [n for n in gm.graph.nodes if n.op == "placeholder"]
            users = [n.name for s, n in zip(signature.input_specs, given) if s.kind is InputKind.USER_INPUT
                     and isinstance(n.meta.get("val"), torch.Tensor)]
            which = dict(zip(users, inputs)).get(spec.target, spec.target)
            raise UnsupportedError(f"{name}: it writes to its input {which!r}, which a package does not do",
                                   hint="return the new value instead, or make it a buffer")
    out.args = (tuple(left),)


def parameters(function: Any) -> list[str]:
    """The names of the parameters that can be passed by position."""
    if isinstance(function, TrainStep):
        return parameters(function.function)
    if isinstance(function, ExportedProgram):
        signature = function.module_call_graph[0].signature
        return list(signature.forward_arg_names or ()) if signature is not None else []
    return [p.name for p in signature_of(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def defaults(function: Any) -> dict[str, Any]:
    """The default values of optional parameters, by name."""
    function = function.function if isinstance(function, TrainStep) else function
    found = () if isinstance(function, ExportedProgram) else signature_of(function)
    return {p.name: p.default for p in found if p.default is not p.empty}


def signature_of(function: Any) -> Sequence[inspect.Parameter]:
    call = function.forward if isinstance(function, torch.nn.Module) else function
    return tuple(inspect.signature(call).parameters.values())


def argument_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Any, dynamic_shapes: Any
                   ) -> tuple[dict[str, Any], list[str], list[Any]]:
    """Flattens arguments. Returns the parameters' names with the values that are not tensors ("fixed"), the names of
    the tensors in order (the parameter's name, then the path inside it), and each one's entry in `dynamic_shapes`."""
    leaves, _ = tree_flatten_with_path((tuple(args), dict(kwargs)))
    known = parameters(function)
    known += [f"argument{at}" for at in range(len(known), len(args))]
    names: list[str] = []
    dims: list[Any] = []
    fixed: dict[str, Any] = {}
    path: Any
    for path, leaf in leaves:
        first, second, *rest = path
        at = second.idx if first.idx == 0 else second.key
        base = at if isinstance(at, str) else known[at]
        keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", ""))) for k in rest]
        name = ".".join((base, *map(str, keys)))
        if not isinstance(leaf, torch.Tensor):
            fixed[name] = plain(leaf)
            continue
        names.append(name)
        said = dynamic_shapes
        for key in (base if isinstance(said, Mapping) else at, *keys):
            said = said.get(key) if isinstance(said, Mapping) else said[key] if said and isinstance(key, int) else None
        dims.append(said)
    fixed |= {k: plain(v) for k, v in defaults(function).items() if k not in (*known[:len(args)], *kwargs)}
    return {"parameters": known, "fixed": fixed}, names, dims


def plain(x: Any) -> Any:
    """A value that is not a tensor, as JSON; other types than JSON's become strings."""
    return x if x is None or isinstance(x, bool | int | float | str) else str(x)


def output(k: int, node: fx.Node) -> Port:
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor) or val.dtype not in DTYPES:
        kind = f"of {val.dtype}" if isinstance(val, torch.Tensor) else f"{val} (a {type(val).__name__})"
        raise UnsupportedError(f"result {k} is {kind}: packages return tensors of real numbers",
                               hint="return its parts, such as torch.view_as_real(x)" if isinstance(
                                   val, torch.Tensor) and val.is_complex() else None)
    return Port(f"output{k}", val.dtype, NAMES[val.dtype], rank=val.dim())


def port(name: str, val: torch.Tensor, dims: Any, known: dict[str, str]) -> Port:
    if val.dtype not in DTYPES or val.dim() > MOST_RANK:
        raise UnsupportedError(f"input {name!r} is {val.dtype} of {val.dim()} dimensions, which packages do not take")
    shown: list[str] = []
    ranges: list[tuple[int, int]] = []
    for k, size in enumerate(val.shape):
        if isinstance(size, int):
            shown.append(str(size))
            ranges.append((size, size))
            continue
        dim = dims.get(k) if isinstance(dims, Mapping) else dims[k] if dims else None
        expr = str(size.node.expr)
        known.setdefault(expr, getattr(dim, "__name__", expr))
        bound = size.node.shape_env.bound_sympy(size.node.expr)
        lo = max(int(bound.lower), 0)
        hi = int(bound.upper) if bound.upper.is_Integer and int(bound.upper) < MOST else MOST
        ranges.append((lo, hi))
        shown.append(known[expr] if hi == MOST else str(lo) if lo == hi else f"{lo}..{hi}")
    order = "contiguous" if val.is_contiguous() else f"with strides [{', '.join(map(str, val.stride()))}]"
    return Port(name, val.dtype, f"{NAMES[val.dtype]} [{', '.join(shown)}] {order}", tuple(ranges), val.dim())
