"""All settings of Flambeau. Each is one typed line: environment variable, default, description.

    from flambeau.config import config

    config.compiler                          # FLAMBEAU_CXX, else "g++"
    with config.override(numerics="eager"):  # for this thread, until the end of the block
        ...

The environment variable of a setting is read once, when the setting is first used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, overload

from flambeau.errors import OptionError, did_you_mean

T = TypeVar("T")


class Setting(Generic[T]):
    """One setting, read as an attribute of `Config`.

    `convert` is called with the text of the environment variable, or with the value given to `override`. It raises
    a ValueError that says what it expects. `default` is a value, or a function if it depends on the machine.
    """

    name: str

    def __init__(
        self, env: str, convert: Callable[[object], T], default: T | Callable[[], T], doc: str
    ) -> None:
        self.env = env
        self.convert = convert
        self.default = default
        self.doc = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, config: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, config: Config, owner: type) -> T: ...
    def __get__(self, config: Config | None, owner: type) -> Setting[T] | T:
        return self if config is None else cast(T, config.read(self))

    def __set__(self, config: Config, value: object) -> None:
        raise AttributeError(f"read-only: set {self.env}, or use config.override({self.name}=...)")

    def checked(self, value: object, source: str) -> T:
        try:
            return self.convert(value)
        except ValueError as error:
            raise OptionError(
                f"{source} is {value!r}, expected {error}", hint=f"{self.name}: {self.doc}"
            ) from None

    def from_environ(self, environ: Mapping[str, str]) -> T:
        # An empty variable counts as unset: `FLAMBEAU_LOG= flambeau demo` uses the default.
        if text := environ.get(self.env):
            return self.checked(text, self.env)
        return self.default() if callable(self.default) else self.default


def _path(value: object) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError("a path")
    return Path(value).expanduser()


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a non-empty string")
    return value


def _positive(value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a positive whole number")
    return value


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _boolean(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"one of {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE


def _verify(value: object) -> bool | str:
    return "passes" if value == "passes" else _boolean(value)


def _debug(value: object) -> int:
    if str(value) not in ("0", "1", "2", "3"):
        raise ValueError("0, 1, 2 or 3")
    return int(str(value))


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


def _one_of(*words: str) -> Callable[[object], str]:
    def convert(value: object) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return str(value)

    return convert


def _user_cache() -> Path:
    # The XDG base directory specification says that a relative path has to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "flambeau"


def _cpu_count() -> int:
    return os.cpu_count() or 1


_numerics = _one_of("fast", "eager")
_contractions = _one_of("choose", "library", "own")
_fallback = _one_of("allow", "error")
_level = _one_of("debug", "info", "warning", "error")
_NO_OVERRIDES: Mapping[str, object] = MappingProxyType({})


class Config:
    """The settings as attributes. Flambeau reads the instance `config`, at the end of this file."""

    # fmt: off
    cache_dir      = Setting("FLAMBEAU_CACHE_DIR", _path, _user_cache, "folder for compiled kernels")
    cache_limit_mb = Setting("FLAMBEAU_CACHE_LIMIT_MB", _positive, 1024, "MiB above which the oldest entries go")
    graph_cache    = Setting("FLAMBEAU_GRAPH_CACHE", _boolean, True, "store whole compiled graphs there too")
    compiler       = Setting("FLAMBEAU_CXX", _text, "g++", "C++ compiler: a name on the PATH, or a path")
    compile_jobs   = Setting("FLAMBEAU_JOBS", _positive, _cpu_count, "number of compilers that run at once")
    compile_timeout = Setting("FLAMBEAU_COMPILE_TIMEOUT", _positive, 600, "seconds after which a compiler is stopped")
    verify         = Setting("FLAMBEAU_VERIFY", _verify, False, "1: check graphs, accesses, results; passes: graphs")
    numerics       = Setting("FLAMBEAU_NUMERICS", _numerics, "fast", "fast, or eager: equal eager PyTorch bit for bit")
    target         = Setting("FLAMBEAU_TARGET", _optional_text, None, "the target that runs all graphs")
    device         = Setting("FLAMBEAU_DEVICE", _text, "opencl", 'the target behind torch.device("flambeau")')
    fallback       = Setting("FLAMBEAU_FALLBACK", _fallback, "allow", "allow, or error: no device operator on the CPU")
    contractions   = Setting("FLAMBEAU_CONTRACTIONS", _contractions, "choose", "matrix products: choose, library, own")
    regions        = Setting("FLAMBEAU_REGIONS", _boolean, True, "compile repeated parts of a graph once")
    region_count   = Setting("FLAMBEAU_REGION_COUNT", _positive, 6, "how often a part must repeat for that")
    search         = Setting("FLAMBEAU_SEARCH", _boolean, False, "time block shapes at first calls, keep the fastest")
    graphs         = Setting("FLAMBEAU_GRAPHS", _boolean, False, "record CUDA graphs and replay them (NVIDIA GPUs)")
    patches        = Setting("FLAMBEAU_PATCHES", _boolean, True, "0: change nothing in torch that others could see")
    progress       = Setting("FLAMBEAU_PROGRESS", _boolean, True, "show a progress bar while compiling takes long")
    nvtx           = Setting("FLAMBEAU_NVTX", _boolean, False, "NVTX ranges around programs and launches (NVIDIA GPUs)")
    debug          = Setting("FLAMBEAU_DEBUG", _debug, 0, "at exit, print 1 a summary, 2 kernels, 3 sources")
    log            = Setting("FLAMBEAU_LOG", _level, "warning", "debug, info, warning or error, to stderr")
    # fmt: on

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.environ = environ
        self._values: dict[str, object] = {}
        # A context variable, so that an override holds only for one thread (or asyncio task). Code that hands work to
        # another thread has to pass the value along, because that thread does not see the override.
        self._overrides: ContextVar[Mapping[str, object]] = ContextVar("overrides", default=_NO_OVERRIDES)
        # Native code reads this word, and calls `variant` only if it is not 0.
        self.changed = ctypes.c_int64(0)
        self._variants: dict[tuple[object, ...], int] = {}

    def read(self, setting: Setting[Any]) -> object:
        """The value of a setting: from the innermost override, else from the environment, else the default."""
        overrides = self._overrides.get()
        if setting.name in overrides:
            return overrides[setting.name]
        if setting.name not in self._values:
            self._values[setting.name] = setting.from_environ(self.environ)
        return self._values[setting.name]

    def variant(self) -> int:
        """A number that stands for the current values of the settings in COMPILED_FOR; 0 without overrides."""
        overrides = self._overrides.get()
        given = tuple((name, overrides[name]) for name in COMPILED_FOR if name in overrides)
        return self._variants.setdefault(given, len(self._variants) + 1) if given else 0

    def is_given(self, name: str) -> bool:
        """Whether an override or the environment sets this setting."""
        return name in self._overrides.get() or bool(self.environ.get(_BY_NAME[name].env))

    @contextmanager
    def override(self, **values: object) -> Iterator[None]:
        """Change settings for this thread, inside a `with` block. Blocks can be nested."""
        if unknown := values.keys() - _BY_NAME.keys():
            raise OptionError(
                f"there is no setting {', '.join(sorted(unknown))}", hint=did_you_mean(min(unknown), _BY_NAME)
            )
        checked = {name: _BY_NAME[name].checked(value, name) for name, value in values.items()}
        if not checked.keys().isdisjoint(COMPILED_FOR):
            self.changed.value = 1  # never reset: a task that was started in the block can outlive it
        token = self._overrides.set({**self._overrides.get(), **checked})
        try:
            yield
        finally:
            self._overrides.reset(token)


SETTINGS: tuple[Setting[Any], ...] = tuple(s for s in vars(Config).values() if isinstance(s, Setting))
# Compiled operators depend on these settings.
COMPILED_FOR = ("numerics", "target", "contractions", "search", "verify")
_BY_NAME = {setting.name: setting for setting in SETTINGS}

config = Config()
