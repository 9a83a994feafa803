# Everything a contributor runs. Each target sets up what it needs, once, in $(VENV).
#
#   make test                            a virtual environment of its own
#   make test VENV= PYTHON=python3       what is installed already; installs nothing
#   make test TORCH=torch==2.11.0        another torch (after `make clean`)
#   make kernels TRITONS=3.9.0           with one Triton

VENV   ?= .venv
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# The CUDA builds of torch bring the Triton they were made with; this is for those that bring none.
TRITON ?= triton==3.6.0
# More arguments for pytest or for the demo: make test ARGS="-m gpu"
ARGS   ?=
# Modules are compiled when they are imported: most never are. Keep their bytecode, whatever the
# environment says: tests start many processes that import torch.
export PYTHONDONTWRITEBYTECODE =
INSTALL = $(PY) -m pip install --no-compile
# Versions that `make kernels` compiles with.
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
# Processes that run tests (pytest-xdist); empty: none beside make's own.
WORKERS ?= 2

TYPED := $(wildcard blocktensor examples benchmarks)

ifeq ($(strip $(VENV)),)
PY    := $(PYTHON)
ready  =
else
PY    := $(VENV)/bin/python
# $(call ready,EXTRA): the stamp that says EXTRA is installed.
ready  = $(VENV)/.$(1).stamp
endif

# Folder where `make kernels` installs each Triton, in a folder of its own.
CACHE = $(or $(VENV),build)

.DEFAULT_GOAL := help
.PHONY: help test quick repeated kernels docs demo demo-moe lint format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

test: $(call ready,test) ## Run the tests (those that need a GPU are skipped without one)
	$(PY) -m pytest $(if $(WORKERS),-n $(WORKERS)) $(ARGS)

QUICK_TESTS = tests/ops/test_reference.py tests/ops/test_formats.py tests/autograd/test_contract.py \
	tests/tensor/test_weight.py tests/tensor/test_fp8_tensor.py tests/conversion/test_convert.py \
	tests/test_functional.py tests/checkpoint/test_save.py \
	tests/sharding/fsdp/test_sharded_models.py tests/sharding/fsdp/test_shard_types.py \
	tests/test_architecture.py

quick: $(call ready,test) ## Run a part of the tests that takes a minute: one of everything
	$(PY) -m pytest $(if $(WORKERS),-n $(WORKERS)) $(ARGS) $(QUICK_TESTS)

repeated: $(call ready,test) ## Run linear layers of CPU tests through player.cpp, as GPUs do
	BLOCKTENSOR_TEST_REPEATED=1 $(PY) -m pytest $(if $(WORKERS),-n $(WORKERS)) $(ARGS) tests/autograd tests/tensor

kernels: $(addprefix kernels-,$(TRITONS)) ## Compile the Hopper kernels with every supported Triton (no GPU)

KERNEL_TESTS = $(shell find tests -name 'test_compile*_sm90.py') tests/ops/runtime/triton_compat

kernels-%: $(call ready,test) $(CACHE)/triton-%
	PYTHONPATH="$(CURDIR)/$(CACHE)/triton-$*" $(PY) -m pytest $(if $(WORKERS),-n $(WORKERS)) \
		--sample 6 -p no:cacheprovider $(KERNEL_TESTS)

.PRECIOUS: $(CACHE)/triton-%
$(CACHE)/triton-%:
	$(INSTALL) --no-deps --target $@.part triton==$*
	mv $@.part $@

docs: $(call ready,docs) ## Build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

demo: $(call ready,demo) ## Train a small language model in FP8 and in bf16, side by side (a CPU: 2 to 4 minutes)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) examples/train_lm.py $(ARGS)

demo-moe: $(call ready,demo) ## Train a small mixture of experts in FP8 and in bf16, side by side (a CPU: 5 to 10)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) examples/train_lm.py --experts 8 $(ARGS)

lint: $(call ready,dev) ## Check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(TYPED)

format: $(call ready,dev) ## Mend style and format
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

clean: ## Remove caches, builds and ./.venv
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(strip $(VENV)),)
$(VENV)/.torch.stamp: Makefile
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	[ "$$(uname)" != Linux ] || $(PY) -c 'import triton' 2>/dev/null || $(INSTALL) $(TRITON)
	touch $@

$(VENV)/.%.stamp: pyproject.toml $(VENV)/.torch.stamp
	$(INSTALL) --editable '.[$*]'
	touch $@
endif
