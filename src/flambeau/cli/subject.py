"""What a command works on: a function in a Python file, a model of the bench suite, or a built-in example."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from flambeau import OptionError

FILES = """\
FILE:FUNC names a function (or an nn.Module) in a Python file. The file also defines FUNC_inputs() or
inputs(), which returns the arguments to call it with: a tuple, or one tensor.

  # example.py
  import torch
  def norm(x): return torch.nn.functional.gelu(x - x.mean(-1, keepdim=True))
  def norm_inputs(): return (torch.randn(64, 512, requires_grad=True),)
"""

WIDTH = 160  # columns, if the output is not a terminal
Subject = tuple[Callable[..., Any], tuple[Any, ...]]


def output(text: str) -> Path:
    """The argparse type of an output file. An error is reported before anything runs."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def existing(text: str) -> str:
    """The argparse type of an input file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return text


def prefix(text: str) -> str:
    """The argparse type of a prefix for the names of output files."""
    output(f"{text}0")
    return text


def page_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def new_table(*columns: str, right: Collection[int] = ()) -> Table:
    """An empty table. The columns in `right` are right-aligned."""
    made = (Column(name, overflow="fold", justify="right" if k in right else "left", no_wrap=k == 0)
            for k, name in enumerate(columns))
    return Table(*made, box=box.SIMPLE_HEAD)


def demo_subject() -> Subject:
    import torch
    import torch.nn.functional as F

    def attend(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias))
        return torch.softmax(y @ y.transpose(-1, -2) / x.shape[-1] ** 0.5, dim=-1)

    shapes = ((4, 64, 256), (256,), (256,))
    return attend, tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


def model_subject(name: str, size: str, infer: bool, device: str = "cpu", dtype: str = "float32",
                  dropout: bool = True) -> Subject:
    import torch

    from flambeau.bench.models import SUITE, without_dropout

    if name not in SUITE:
        raise OptionError(f"there is no model {name!r}", hint=f"models: {', '.join(SUITE)}")
    built = SUITE[name].build(size, device=device, dtype=getattr(torch, dtype))
    *inputs, target = built.make_inputs()
    module, loss_of = built.module, built.loss
    if not dropout:
        without_dropout(module)
    if infer:
        return module.eval(), tuple(inputs)

    def loss(*inputs: Any) -> Any:
        return loss_of(module(*inputs), target)

    return loss, tuple(inputs)


def file_function(text: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function that FILE:FUNC names, and the file's module."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise OptionError(f"{text!r} is not FILE:FUNC", hint="for example model.py:forward")
    module = load(Path(path))
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{path} defines no function {name}")
    return function, module


def file_subject(text: str) -> Subject:
    function, module = file_function(text)
    path, _, name = text.rpartition(":")
    make = getattr(module, f"{name}_inputs", None) or getattr(module, "inputs", None)
    if not callable(make):
        raise OptionError(f"{path} does not define inputs for {name}",
                          hint=f"define {name}_inputs() or inputs(), which returns a tuple of arguments")
    inputs = make()
    return function, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def load(path: Path) -> ModuleType:
    """Load a file as a module. Like a script, it can import files in its own folder."""
    if not path.is_file():
        raise OptionError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
