# Flambeau: `make demo` and `make test` set up everything themselves. They need Python 3.11 to 3.13, g++ and make.
#
#   PYTHON       the interpreter for the environment in .venv
#   CONSTRAINTS  a pip constraints file with the versions to install; pip's PIP_* variables work too
#   JOBS         number of tests that run at once
#   TARGET, COUNT, FUZZ  for `make fuzz`: cpu, interpreter, opencl or device; number of programs; other options
#   FILES        for test-torch: parts of the names of PyTorch's test files

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
.PHONY: help setup demo lint test test-all test-newest fuzz test-torch test-outside test-metal test-gpu test-site test-install bench docs clean check-compiler

help:
	@echo "make setup     install Flambeau and its tools into $(VENV)"
	@echo "make demo      a tour: train two small models with eager, Inductor and Flambeau"
	@echo "make test      linters, the fast tests, and a sample of the slow ones"
	@echo "make test-all  all tests with all samples (long)"
	@echo "make test-newest  the tests with the newest torch, in a separate environment ($(NEWEST))"
	@echo "make test-torch PYTORCH_TESTS=path   PyTorch's own tests, on the device and with the backend (hours)"
	@echo "make test-outside  train models of the transformers library on the device and on the CPU (long)"
	@echo "make test-metal  operator tests and small models on a Mac's GPU; writes results/metal.json"
	@echo "make test-gpu  streams, packages and speed on an NVIDIA GPU, in half an hour; writes build/gpu/results.tar.gz"
	@echo "make fuzz      compare COUNT=2000 random programs on TARGET=cpu with eager"
	@echo "make bench     measure Flambeau beside eager and Inductor"
	@echo "make docs      write the generated pages in docs/, and build the site into build/site"
	@echo "make test-site  check the pages and reports in headless Chromium, and the notebook in Jupyter"
	@echo "make test-install  install wheel and sdist in a clean environment of PYTHON, and try them"
	@echo "make clean     remove build products and tool caches; $(VENV) stays"

setup: check-compiler $(READY)

check-compiler:
	@command -v "$(CXX_FOUND)" >/dev/null || { \
	  echo "Flambeau compiles its kernels with $(CXX_FOUND), which was not found."; \
	  echo "Install g++ (package g++ or gcc-c++), or name another compiler: FLAMBEAU_CXX=clang++ make ..."; \
	  exit 1; } >&2

# The checks are in the recipe, because an existing environment is kept, whatever interpreter is on the PATH.
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

# torch is installed first, with the constraints, so that the extras do not choose another build of it.
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

# Without constraints: the newest versions. torch first, for the reason above.
test-newest: check-compiler $(NEWEST)/bin/python
	@echo "==> installing the newest torch and Flambeau into $(NEWEST)"
	@$(NEWEST)/bin/python $(INSTALL) --upgrade torch
	@$(NEWEST)/bin/python $(INSTALL) --upgrade -e '.[test]'
	@$(NEWEST)/bin/python -c 'import torch; print("==> tests with torch", torch.__version__)'
	@$(NEWEST)/bin/python -m pytest -q -n $(JOBS) -m "not sweep"

# Results are kept in build/torch-tests, so that an interrupted run continues.
test-torch: setup
	@test -f "$(PYTORCH_TESTS)/test_torch.py" || { \
	  echo "PYTORCH_TESTS must be the folder "test" of PyTorch's sources, of the same version as torch in $(VENV)."; \
	  exit 1; } >&2
	@echo "==> PyTorch's tests"
	@mkdir -p results
	@PYTHONPATH=tests nice -n 15 $(BIN)/python -m torch_suite "$(PYTORCH_TESTS)" $(FILES) --jobs $(JOBS) \
	  --json results/torch-tests.json

test-outside: setup
	@echo "==> models of the transformers library on the device"
	@$(PIP) transformers
	@$(BIN)/python tests/outside_models.py --jobs $(JOBS) --json results/outside-models.json

# Only for Macs. Please send us the file.
test-metal: setup
	@echo "==> Metal kernels on this Mac's GPU"
	@mkdir -p results
	@PYTHONPATH=tests $(BIN)/python tests/metal_on_a_mac.py --json results/metal.json

test-gpu: setup
	@$(BIN)/python tests/gpu_session.py --out build/gpu

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
	@FLAMBEAU_SAMPLE=1 $(BIN)/python -m pytest -q tests/test_site.py tests/test_examples.py::test_notebook_in_jupyter

# With the newest torch. One environment after the other, because torch is large.
test-install:
	@rm -rf build/dist build/install
	@echo "==> wheel and sdist"
	@"$(PYTHON)" -m venv build/install/builder
	@build/install/builder/bin/python $(INSTALL) build
	@build/install/builder/bin/python -m build --outdir build/dist . > build/install/build.log
	@for archive in build/dist/*.whl build/dist/*.tar.gz; do \
	  echo "==> $$archive in a clean environment"; \
	  "$(PYTHON)" tests/installed.py $$archive build/install/clean || exit 1; done

clean:
	@echo "==> removing build products and caches"
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
