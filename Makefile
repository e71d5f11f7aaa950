# Each target does all the set-up it needs: a virtual environment in .venv, the pinned packages, the project itself.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG := .venv-sglang
RUN := runs/demo
JOBS ?= 2

.PHONY: demo test test-sglang fuzz lint benchmarks clean

demo: $(STAMP)
	$(BIN)/python scripts/run_deepseek.py --config configs/tiny.toml --run-dir $(RUN)

# Files in alphabetical order: the end-to-end tests and the laws, of which a file takes a minute, are not left to the end.
# Threads that wait for each other sleep: they would spin on cores that other processes of the tests could use.
test: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# stock SGLang on CPU, in an environment of its own: its pins are not ours
test-sglang: $(STAMP) $(SGLANG)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sglang_cpu

# the long tier of tests/fuzz: make fuzz SEED=7; the last result of each target is in tests/fuzz/RESULTS.md
SEED ?= 0
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.fuzz --seed $(SEED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmarks: $(STAMP)
	for b in benchmarks/*.py; do $(BIN)/python $$b || exit 1; done

# torch first and alone, so that what follows finds its pin satisfied; make TORCH='...' chooses another build of it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.11 ...") if v < (3, 11) else None'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# without dependencies: SGLang's own are kernels for GPUs, and another torch
$(SGLANG)/.installed: tests/sglang_cpu/requirements.txt
	test -d $(SGLANG) || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) runs build *.egg-info
