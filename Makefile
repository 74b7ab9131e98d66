# Flambeau: `make demo` and `make test` do all their own set-up. They need Python 3.11 to 3.13, g++ and make.
#
#   PYTHON       the interpreter that the environment in .venv is made with
#   CONSTRAINTS  the versions that are installed; pip's own PIP_* variables are honoured as well
#   JOBS         how many tests run at once
#   TARGET, COUNT, FUZZ  what `make fuzz` runs: cpu, interpreter, opencl or device; how many programs; other options
#   FILES        parts of names of PyTorch's test files, for test-torch

PYTHON      ?= python3
CONSTRAINTS ?= constraints.txt
CXX_FOUND    = $(or $(FLAMBEAU_CXX),g++)
JOBS        ?= 2
TARGET      ?= cpu
COUNT       ?= 2000
FUZZ        ?=

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
NEWEST := build/newest
INSTALL := -m pip install --quiet --disable-pip-version-check
PIP   := $(BIN)/python $(INSTALL) -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help setup demo lint test test-all test-newest fuzz test-torch test-outside test-metal test-site test-install bench docs clean check-compiler

help:
	@echo "make setup     install Flambeau and its tools into $(VENV)"
	@echo "make demo      set up, then take the tour"
	@echo "make test      set up, then linters, the fast tests and a sample of the slow ones"
	@echo "make test-all  the same with every sample of every operator (long)"
	@echo "make test-newest  the tests with the newest torch, in an environment of its own ($(NEWEST))"
	@echo "make test-torch PYTORCH_TESTS=path   PyTorch's own tests on the device and the backend (hours)"
	@echo "make test-outside  models of the transformers library train on the device as on the CPU (long)"
	@echo "make test-metal  the operator database and small models on a Mac's GPU, for results/metal.json"
	@echo "make fuzz      COUNT=2000 random programs on TARGET=cpu against eager, seeds drawn anew"
	@echo "make bench     Flambeau beside eager and Inductor"
	@echo "make docs      rewrite the generated pages under docs/, and build the site into build/site"
	@echo "make test-site  its pages and reports in headless Chromium: errors, phone and dark, accessibility"
	@echo "make test-install  wheel and sdist, each in a clean environment made with PYTHON"
	@echo "make clean     remove build products and tool caches; $(VENV) stays"

setup: check-compiler $(READY)

check-compiler:
	@command -v "$(CXX_FOUND)" >/dev/null || { \
	  echo "Flambeau compiles its kernels with $(CXX_FOUND), which was not found."; \
	  echo "Install g++ (package g++ or gcc-c++), or name another compiler: FLAMBEAU_CXX=clang++ make ..."; \
	  exit 1; } >&2

# An environment that is there stays, whatever interpreter is on the PATH today; so the checks stand in the recipe.
$(BIN)/python $(NEWEST)/bin/python: %/bin/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) was not found. Install Python 3.11 to 3.13, or name it: make PYTHON=python3.12 ..."; \
	  exit 1; } >&2
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "Flambeau needs Python 3.11 to 3.13, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 ..."; \
	  exit 1; } >&2
	@echo "==> making the environment $* with $(PYTHON)"
	@"$(PYTHON)" -m venv $* || { \
	  rm -rf $*; \
	  echo "$(PYTHON) cannot make environments. On Debian and Ubuntu, install the package python3-venv."; \
	  exit 1; } >&2

# torch first and alone, under the constraint: the extras must not choose another build of it.
$(READY): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "==> installing torch (a large download the first time)"
	@$(PIP) torch
	@echo "==> installing Flambeau with its test and lint tools"
	@$(PIP) -e '.[test,dev,docs]'
	@touch $@

demo: setup
	@echo "==> flambeau demo"
	@$(BIN)/flambeau demo

lint: setup
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> import order"
	@$(BIN)/lint-imports --no-logo

test: lint
	@echo "==> tests: the fast tier and a sample of the slow one"
	@$(BIN)/python -m pytest -q -n $(JOBS) -m "not sweep"

test-all: lint
	@echo "==> tests: everything"
	@FLAMBEAU_SAMPLE=1 $(BIN)/python -m pytest -q -n $(JOBS)

# No constraints: what `pip install` gives today. torch first, for the reason above.
test-newest: check-compiler $(NEWEST)/bin/python
	@echo "==> installing the newest torch and Flambeau into $(NEWEST)"
	@$(NEWEST)/bin/python $(INSTALL) --upgrade torch
	@$(NEWEST)/bin/python $(INSTALL) --upgrade -e '.[test]'
	@$(NEWEST)/bin/python -c 'import torch; print("==> tests with torch", torch.__version__)'
	@$(NEWEST)/bin/python -m pytest -q -n $(JOBS) -m "not sweep"

# What is known is kept in build/torch-tests, so that a run that was stopped goes on where it was.
test-torch: setup
	@test -f "$(PYTORCH_TESTS)/test_torch.py" || { \
	  echo "PYTORCH_TESTS is to be the folder test of PyTorch's sources, of the version of torch in $(VENV)."; \
	  exit 1; } >&2
	@echo "==> PyTorch's tests"
	@mkdir -p results
	@PYTHONPATH=tests nice -n 15 $(BIN)/python -m torch_suite "$(PYTORCH_TESTS)" $(FILES) --jobs $(JOBS) \
	  --json results/torch-tests.json

test-outside: setup
	@echo "==> models of the transformers library on the device"
	@$(PIP) transformers
	@$(BIN)/python tests/outside_models.py --jobs $(JOBS) --json results/outside-models.json

# On a Mac, once: what only a Mac can show. The file can be sent back.
test-metal: setup
	@echo "==> Metal kernels on this Mac's GPU"
	@mkdir -p results
	@PYTHONPATH=tests $(BIN)/python tests/metal_on_a_mac.py --json results/metal.json

fuzz: setup
	@echo "==> $(COUNT) random programs on $(TARGET)"
	@PYTHONPATH=tests $(BIN)/python -m fuzz --target $(TARGET) --count $(COUNT) --jobs $(JOBS) $(FUZZ)

bench: setup
	@echo "==> flambeau bench"
	@mkdir -p results
	@$(BIN)/flambeau bench models --json results/models-cpu.json
	@$(BIN)/flambeau bench compile --json results/compile-cpu.json
	@$(BIN)/flambeau bench ops --json results/ops-cpu.json

docs: setup
	@echo "==> docs/reference/settings.md"
	@$(BIN)/python -m flambeau.report.settings > docs/reference/settings.md
	@echo "==> docs/reference/exact-operators.md"
	@$(BIN)/python -m flambeau.report.numerics > docs/reference/exact-operators.md
	@echo "==> docs/reference: Python, options, commands"
	@$(BIN)/python -m flambeau.cli.reference docs/reference
	@echo "==> docs/results"
	@$(BIN)/python -m flambeau.report.performance results docs/results
	@echo "==> docs/results/fuzzing.md"
	@PYTHONPATH=tests $(BIN)/python -m fuzz.results results/fuzz.json > docs/results/fuzzing.md
	@echo "==> docs/guides/device.md"
	@PYTHONPATH=tests $(BIN)/python -m torch_suite.report results/torch-tests.json docs/guides/device.md
	@echo "==> build/site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

test-site: setup
	@command -v chromium >/dev/null || { echo "test-site needs Chromium (Debian: apt install chromium)."; exit 1; } >&2
	@echo "==> the site in headless Chromium"
	@$(PIP) '.[site]'
	@$(BIN)/python -m pytest -q tests/test_site.py

# With whatever torch the index has. One environment after the other: torch is large.
test-install:
	@rm -rf build/dist build/install
	@echo "==> wheel and sdist"
	@"$(PYTHON)" -m venv build/install/builder
	@build/install/builder/bin/python $(INSTALL) build
	@build/install/builder/bin/python -m build --outdir build/dist . > build/install/build.log
	@for archive in build/dist/*.whl build/dist/*.tar.gz; do \
	  echo "==> $$archive in an environment of its own"; \
	  "$(PYTHON)" tests/installed.py $$archive build/install/clean || exit 1; done

clean:
	@echo "==> removing build products and caches"
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
