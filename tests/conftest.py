"""Configures all tests: the verifier is on, and kernels go to a cache that only this session uses."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib

import pytest

from drawn import commit

# At import and in the environment: settings are read at their first use, and the workers of pytest-xdist
# inherit both from the process that starts them.
os.environ.setdefault("FLAMBEAU_VERIFY", "passes")
# Triton interprets GPU kernels here. It reads the variable when it is imported, which torch.compile does early.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests that do not use the device run without its name registered; test_autoload.py starts its own processes.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("FLAMBEAU_REGION_COUNT", "4")  # so that small models have regions
_own_cache = None
if "FLAMBEAU_CACHE_DIR" not in os.environ:
    _own_cache = os.environ["FLAMBEAU_CACHE_DIR"] = tempfile.mkdtemp(prefix="flambeau-tests-")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        # The workers already use all cores; more threads per worker would only wait for each other.
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


# `make test` runs one in SAMPLE of the slow tests, drawn by the commit: each commit has another sample, which is the
# same on every machine. `make test-all` sets FLAMBEAU_SAMPLE=1.
SAMPLE = int(os.environ.get("FLAMBEAU_SAMPLE", "16"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if len(config.args) == 1 and "::" in config.args[0]:
        return  # a single test was selected on the command line
    drawn = commit()
    kept = [i for i in items if "slow" not in i.keywords or zlib.crc32(f"{drawn} {i.nodeid}".encode()) % SAMPLE == 0]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
        items[:] = kept
