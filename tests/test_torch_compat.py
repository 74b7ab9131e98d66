"""torch's internals are used in one place: no other module names or changes them, and all changes can be undone."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flambeau
from flambeau import torch_compat
from flambeau.compile import kept_by_dynamo as intact
from flambeau.compile.backend import flambeau_backend
from flambeau.config import config
from flambeau.optim import compiled_steps as steps
from flambeau.optim.eager_steps import EagerSteps
from flambeau.torch_compat import optim
from flambeau.torch_compat.attributes import ATTRIBUTES
from flambeau.torch_compat.patch import MISSING, Patch, found_at
from flambeau.torch_compat.patches import FRAMES, OPTIMIZERS, PATCHES

SOURCE = Path(flambeau.__file__).parent
HOME = SOURCE / "torch_compat"
SETTERS = ("setattr", "delattr")
# Private attributes of Python's, ctypes', PyOpenCL's and Triton's objects.
OTHERS = {"_Pointer", "_at_fork_reinit", "_cl", "_exit", "_fields", "_get_np_dtype", "_getframe", "_handle",
          "_patch_lang_tensor", "_replace"}


# ---- the check of the sources -------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    """Whether a dotted name of torch is private; operators under their registered names are not."""
    parts = name.split(".")
    return parts[:2] != ["torch", "ops"] and any(p.startswith("_") and not p.endswith("__") for p in parts)


class Reader(ast.NodeVisitor):
    """Collects the uses of torch's internals in one file, as `line: name`."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[str] = []
        self.bound: dict[str, str] = {}  # names in this file that are bound to something of torch
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.bound |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names
                               if a.name.split(".")[0] == "torch"}
            elif isinstance(node, ast.ImportFrom) and self.is_torch(node):
                self.bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        self.visit(tree)

    @staticmethod
    def is_torch(node: ast.ImportFrom) -> bool:
        return not node.level and (node.module or "").split(".")[0] in ("torch", "flambeau") and (
            node.module or "").removeprefix("flambeau.").split(".")[0] in ("torch", "torch_compat")

    def say(self, node: Any, what: str) -> None:
        self.found.append(f"{node.lineno}: {what}")

    def dotted(self, node: ast.AST) -> str | None:
        """The full name, such as `torch.optim.adam`, of an attribute expression that begins with something of torch."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.bound:
            return ".".join([self.bound[node.id], *reversed(parts)])
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for a in node.names:
            if a.name.startswith("torch.") and is_private(a.name):
                self.say(node, f"import {a.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for a in node.names:
            if self.is_torch(node) and is_private(f"{node.module}.{a.name}"):
                self.say(node, f"from {node.module} import {a.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name is None:
            self.generic_visit(node)
        elif is_private(name):
            self.say(node, name)
        elif not isinstance(node.ctx, ast.Load):
            self.say(node, f"{name} is assigned")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        name = self.dotted(node.value)
        if name is not None and not isinstance(node.ctx, ast.Load):
            self.say(node, f"an element of {name} is assigned")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        first = self.dotted(node.args[0]) if node.args else None
        if first is not None and (function in SETTERS or function.endswith("patch.object")):
            self.say(node, f"{function} of {first}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Finds private modules named in strings, as in `importlib.import_module`."""
        text = node.value
        if isinstance(text, str) and text.startswith("torch.") and text.replace(".", "").isidentifier():
            if is_private(text):
                self.say(node, repr(text))


def sources() -> Iterator[Path]:
    return (p for p in sorted(SOURCE.rglob("*.py")) if HOME not in p.parents)


def test_nobody_else_names_or_changes_torchs_inside() -> None:
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in sources()
             for line in Reader(ast.parse(path.read_text())).found]
    assert not found, "these belong into flambeau/torch_compat:\n" + "\n".join(found)


def test_private_attributes_of_torchs_objects_are_listed() -> None:
    """A syntax tree has no types, so private names that are not defined here count as torch's."""
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    defined = {getattr(n, "name", None) or getattr(n, "id", None) or getattr(n, "arg", None) for _, n in nodes
               if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.alias | ast.arg | ast.Name)}
    defined |= {n.attr for _, n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                and ast.unparse(n.value) in ("self", "cls")}
    found = [f"{path.relative_to(SOURCE)}:{n.lineno}: {ast.unparse(n)}" for path, n in nodes
             if isinstance(n, ast.Attribute) and is_private(n.attr) and n.attr not in defined | OTHERS | set(ATTRIBUTES)
             and not ast.unparse(n.value).startswith(("aten", "torch.ops"))]
    assert not found, "these belong into the table of flambeau/torch_compat/attributes.py:\n" + "\n".join(found)


@pytest.mark.parametrize("text", [
    "import torch._dynamo", "from torch._ops import OpOverload", "from torch.utils import _pytree as pytree",
    "import torch\ntorch._C._get_tracing_state()", "import torch as t\nt.fx.node._side_effectful_functions",
    "import torch\ntorch.Tensor.pin_memory = f", "import torch\nsetattr(torch.Tensor, 'x', f)",
    "import torch\ntorch.backends.cuda.x.y += 1", "from torch import Tensor\ndel Tensor.pin_memory",
    "import torch\nx: torch._ops.OpOverload", "import torch\nwith patch.object(torch.optim, 'x'): pass",
    "from flambeau.torch_compat.dynamo import config\nconfig.recompile_limit = 8",
    "import importlib\nimportlib.import_module('torch._inductor.compile_fx')", "import torch\ntorch.optim.x['y'] = 3"])
def test_the_check_sees(text: str) -> None:
    assert Reader(ast.parse(text)).found


@pytest.mark.parametrize("text", [
    "import torch\ntorch.ops.aten._softmax.default(x)", "import torch\nx = torch.empty(3)\nx.names = 4",
    "import torch\ntorch.Tensor.__dlpack__",
    "from flambeau.torch_compat.ops import OpOverload\nisinstance(x, OpOverload)"])
def test_the_check_lets_pass(text: str) -> None:
    assert not Reader(ast.parse(text)).found


# ---- the names ----------------------------------------------------------------------------------------------


def test_every_name_is_there_and_every_file_fits_in_the_head() -> None:
    for info in pkgutil.iter_modules(torch_compat.__path__):
        module = importlib.import_module(f"flambeau.torch_compat.{info.name}")
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
        assert (module.__doc__ or "").strip() and len(Path(module.__file__ or "").read_text().splitlines()) <= 260


def test_what_is_imported_with_torch_imports_nothing_of_it() -> None:
    """The device is announced while torch is being imported: no part of torch is loaded for it."""
    text = ("import sys, torch; before = {*sys.modules}; import flambeau.device.autoload;"
            "print(*sorted(m for m in {*sys.modules} - before if m.startswith('torch')))")
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True,
                         env={"PYTHONPATH": str(SOURCE.parent), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert ran.stdout.split() == []


# ---- the patches --------------------------------------------------------------------------------------------


def given(patch: Patch) -> tuple[Any, ...]:
    """Example arguments for applying a patch."""
    routes = steps.Routes(lambda callback: None)
    some = torch.ops.aten.upsample_nearest2d.vec
    every: dict[str, tuple[Any, ...]] = {
        "frames": (lambda convert: len,), "calls": (lambda callback: None,), "disabled": (), "readings": (),
        "optimizers": (routes.routed, routes.remembering),
        "before_start": (len, len, len), "dlpack": (lambda own: len,), "sharing": (lambda own: len,),
        "wrappers": (len,), "cache": (len, len), "shared_inputs": (), "objects": (), "cut": ((some,), ()),
        "handlers": (*intact.handled(), lambda handler, number: len), "traced_streams": (lambda callback: False,),
        "kernels": ({some: {**dict.fromkeys(some.py_kernels, MISSING), torch._C.DispatchKey.Meta: len}},),
        "counts": (importlib.import_module("torch.optim.adam"), [], 3), "compiling": (True,)}
    return every[patch.name]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_a_patch_undoes_itself(patch: Patch) -> None:
    arguments = given(patch)
    places = [(owner, name) for owner, name, _ in patch.changes(*arguments)]
    before = [found_at(*place) for place in places]
    assert places and patch.reason and patch.scope and patch.versions
    depth = len(patch._made)
    for count in (1, 2):  # applied twice, one on top of the other
        for _ in range(count):
            patch.apply(*arguments)
        assert any(found_at(*place) is not own for place, own in zip(places, before, strict=True))
        for _ in range(count):
            patch.undo()
        assert [found_at(*place) for place in places] == before
        assert len(patch._made) == depth


def test_an_undo_leaves_what_others_changed_since() -> None:
    class Owner:
        value = 1

    patch = Patch("test", "Owner.value", "a test", "here", lambda new: [(Owner, "value", new), (Owner, "other", new)])
    with patch.applied(2):
        assert (Owner.value, Owner.other) == (2, 2)  # type: ignore[attr-defined]
        Owner.value = 3
    assert Owner.value == 3 and not hasattr(Owner, "other")


def test_threads_may_end_in_another_order_than_they_began() -> None:
    class Owner:
        value = 1

    patch = Patch("test", "Owner.value", "a test", "here", lambda new: [(Owner, "value", new)])
    entered = threading.Event()

    def other() -> None:
        with patch.applied(3):
            entered.set()
            left.wait()

    left, thread = threading.Event(), threading.Thread(target=other)
    with patch.applied(2):
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert Owner.value == 1


def functions() -> list[Any]:
    return [getattr(place, name) for module, name, _ in optim.FUNCTIONS for place in optim.places(module, name)]


@pytest.fixture
def routes() -> Iterator[steps.Routes]:
    """The state of a process in which the backend has not seen an optimizer yet."""
    made = steps.install(flambeau_backend)
    assert made is not None
    while OPTIMIZERS.is_applied:
        OPTIMIZERS.undo()
    made.users, made.is_kept = 0, False
    yield made
    while OPTIMIZERS.is_applied:
        OPTIMIZERS.undo()
    made.users, made.is_kept = 0, False


def test_optimizers_are_torchs_until_this_backend_meets_one(routes: steps.Routes) -> None:
    torch.compiler.reset()
    before = functions()
    model = torch.nn.Linear(3, 3)
    torch.compile(model, backend="flambeau")(torch.ones(2, 3)).sum().backward()
    assert functions() == before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]
    torch.compile(optimizer.step, backend="flambeau")()
    assert functions() != before and routes.is_kept
    assert all(map(torch.equal, model.parameters(), expected))


def test_steps_of_accelerated_devices_are_ours_as_long_as_they_are_wanted(routes: steps.Routes) -> None:
    before = functions()
    wish = EagerSteps("cpu")
    wish._start()
    assert functions() != before
    wish.undo()
    assert functions() == before


def test_without_patches_steps_are_traced(routes: steps.Routes) -> None:
    with config.override(patches=False):
        assert steps.install.__wrapped__(flambeau_backend) is None
    before = functions()
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    passing = FRAMES._made[-1].given
    FRAMES.undo()
    try:
        torch.compiler.reset()
        torch.compile(optimizer.step, backend="flambeau")()
    finally:
        FRAMES.apply(*passing)
        torch.compiler.reset()
    assert parameter.tolist() == [0.0] * 3 and functions() == before and not routes.is_kept
