"""Settings: defaults, environment, overrides, and errors that name the variable."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flambeau import OptionError
from flambeau.config import SETTINGS, Config
from flambeau.report.settings import page


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    config = Config({})
    assert config.cache_dir == Path("/somewhere/flambeau")
    assert config.cache_limit_mb == 1024
    assert config.compiler == "g++"
    assert config.compile_jobs == os.cpu_count()
    assert config.verify is False
    assert config.numerics == "fast"
    assert config.log == "warning"


@pytest.mark.parametrize("xdg", ["", "relative/path"])
def test_invalid_xdg_cache_is_ignored(monkeypatch: pytest.MonkeyPatch, xdg: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert Config({}).cache_dir == Path.home() / ".cache" / "flambeau"


ENVIRONMENT = [
    ("cache_dir", "FLAMBEAU_CACHE_DIR", "~/kernels", Path.home() / "kernels"),
    ("cache_limit_mb", "FLAMBEAU_CACHE_LIMIT_MB", "64", 64),
    ("graph_cache", "FLAMBEAU_GRAPH_CACHE", "off", False),
    ("compiler", "FLAMBEAU_CXX", "clang++", "clang++"),
    ("compile_jobs", "FLAMBEAU_JOBS", " 3 ", 3),
    ("compile_timeout", "FLAMBEAU_COMPILE_TIMEOUT", "30", 30),
    ("verify", "FLAMBEAU_VERIFY", "Yes", True),
    ("verify", "FLAMBEAU_VERIFY", "0", False),
    ("verify", "FLAMBEAU_VERIFY", "passes", "passes"),
    ("numerics", "FLAMBEAU_NUMERICS", "eager", "eager"),
    ("target", "FLAMBEAU_TARGET", "interpreter", "interpreter"),
    ("device", "FLAMBEAU_DEVICE", "echo", "echo"),
    ("fallback", "FLAMBEAU_FALLBACK", "error", "error"),
    ("contractions", "FLAMBEAU_CONTRACTIONS", "own", "own"),
    ("regions", "FLAMBEAU_REGIONS", "0", False),
    ("region_count", "FLAMBEAU_REGION_COUNT", "12", 12),
    ("patches", "FLAMBEAU_PATCHES", "0", False),
    ("search", "FLAMBEAU_SEARCH", "on", True),
    ("graphs", "FLAMBEAU_GRAPHS", "1", True),
    ("progress", "FLAMBEAU_PROGRESS", "0", False),
    ("nvtx", "FLAMBEAU_NVTX", "1", True),
    ("debug", "FLAMBEAU_DEBUG", "2", 2),
    ("log", "FLAMBEAU_LOG", "debug", "debug"),
    ("log", "FLAMBEAU_LOG", "", "warning"),
]


@pytest.mark.parametrize(("name", "env", "text", "value"), ENVIRONMENT)
def test_environment(name: str, env: str, text: str, value: object) -> None:
    assert getattr(Config({env: text}), name) == value


def test_every_setting_is_tested_and_documented() -> None:
    assert {setting.name for setting in SETTINGS} == {row[0] for row in ENVIRONMENT}
    assert all(setting.doc and setting.env.startswith("FLAMBEAU_") for setting in SETTINGS)
    written = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
    assert written.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("FLAMBEAU_CACHE_LIMIT_MB", "0"),
        ("FLAMBEAU_JOBS", "many"),
        ("FLAMBEAU_JOBS", "-1"),
        ("FLAMBEAU_VERIFY", "maybe"),
        ("FLAMBEAU_NUMERICS", "exact"),
        ("FLAMBEAU_LOG", "loud"),
    ],
)
def test_bad_environment_names_the_variable(env: str, text: str) -> None:
    setting = next(setting for setting in SETTINGS if setting.env == env)
    with pytest.raises(OptionError, match=f"{env} is '{text}', expected"):
        getattr(Config({env: text}), setting.name)


def test_environment_is_read_once() -> None:
    environ = {"FLAMBEAU_CXX": "first"}
    config = Config(environ)
    assert config.compiler == "first"
    environ["FLAMBEAU_CXX"] = "second"
    assert config.compiler == "first"


def test_overrides_nest_and_end() -> None:
    config = Config({})
    with config.override(numerics="eager", cache_dir="/a"):
        assert (config.numerics, config.cache_dir) == ("eager", Path("/a"))
        with config.override(numerics="fast", verify=True):
            assert (config.numerics, config.verify, config.cache_dir) == ("fast", True, Path("/a"))
        assert (config.numerics, config.verify) == ("eager", False)
    assert config.numerics == "fast"


def test_override_ends_with_an_exception() -> None:
    config = Config({})
    with pytest.raises(KeyError), config.override(verify=True):
        raise KeyError
    assert config.verify is False


def test_override_is_for_one_thread() -> None:
    config, seen = Config({}), []
    with config.override(numerics="eager"):
        thread = threading.Thread(target=lambda: seen.append(config.numerics))
        thread.start()
        thread.join()
        assert config.numerics == "eager"
    assert seen == ["fast"]


@pytest.mark.parametrize("values", [{"numerix": "eager"}, {"numerics": "exact"}, {"compile_jobs": True}])
def test_bad_override(values: dict[str, object]) -> None:
    (name,) = values
    with pytest.raises(OptionError, match=name), Config({}).override(**values):
        pass


def test_settings_are_read_only() -> None:
    with pytest.raises(AttributeError, match=r"config\.override\(verify="):
        Config({}).verify = True  # type: ignore[misc]
