"""What all tests share: the verifier is on, and kernels go to a cache of this session only."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

# At import and in the environment: settings are read at their first use, and the workers of pytest-xdist
# inherit both from the process that starts them.
os.environ.setdefault("FLAMBEAU_VERIFY", "1")
_own_cache = None
if "FLAMBEAU_CACHE_DIR" not in os.environ:
    _own_cache = os.environ["FLAMBEAU_CACHE_DIR"] = tempfile.mkdtemp(prefix="flambeau-tests-")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        # The workers already fill the cores; more threads in each of them only wait for one another.
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)
