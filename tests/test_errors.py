"""Errors name the operator, shapes, dtypes, target and the way out, and stay readable by programs."""

from __future__ import annotations

import pickle

import pytest
import torch

import flambeau
from flambeau.errors import CacheError, CompileError, Error, OptionError, UnsupportedError


def sample() -> CompileError:
    return CompileError(
        "the generated text did not compile",
        operator="aten.hardswish",
        shapes=[torch.Size([2, 3]), ()],
        dtypes=[torch.float32, "int64"],
        target="cpu",
        hint="set FLAMBEAU_VERIFY=1 to see more",
    )


def test_message_shows_every_field() -> None:
    assert str(sample()).splitlines() == [
        "aten.hardswish: the generated text did not compile",
        "  shapes: [2, 3], []",
        "  dtypes: float32, int64",
        "  target: cpu",
        "  hint: set FLAMBEAU_VERIFY=1 to see more",
    ]


def test_message_without_fields_is_the_message() -> None:
    assert str(Error("no such thing")) == "no such thing"


def test_fields_are_attributes() -> None:
    error = sample()
    assert (error.operator, error.target) == ("aten.hardswish", "cpu")
    assert (error.shapes, error.dtypes) == (((2, 3), ()), ("float32", "int64"))


def test_errors_survive_pickle() -> None:
    copy = pickle.loads(pickle.dumps(sample()))
    assert type(copy) is CompileError
    assert str(copy) == str(sample())


@pytest.mark.parametrize("kind", [CompileError, CacheError, OptionError, UnsupportedError])
def test_all_are_flambeau_errors(kind: type[Error]) -> None:
    assert issubclass(kind, flambeau.Error)
    assert issubclass(kind, RuntimeError)
    assert getattr(flambeau, kind.__name__) is kind


def test_a_bad_option_is_a_value_error() -> None:
    assert issubclass(OptionError, ValueError)
