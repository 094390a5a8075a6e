# The commands of the house. Everything is installed into .venv, with the versions of constraints.txt; where packages
# come from, and so which build of torch (CPU or CUDA), is left to pip's own configuration.

PYTHON ?= python3
VENV   ?= .venv
JOB    ?= examples/digits.plt
ARGS   ?=
PYTEST_ARGS ?=

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Compiling all modules beforehand is half of an installation; Python compiles at its first use what is used.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
FLOORS := dsl compiler runtime grammar
TYPES  := build/types/dslc
# The folders that hold tests; pytest puts each on the path, so that a test may use one beside it.
empty  :=
TESTS  := $(patsubst %/,%,$(filter-out tests/helpers/ tests/instruments/%,$(sort $(dir $(wildcard tests/*.py tests/*/*.py tests/*/*/*.py)))))

# A start of dslc that may not store its compiled modules compiles them every time, which is most of its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install run quick test tests rest test-all backends lint types linked covered slowest long bench docs rooms clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: $(STAMP) ## dslc and the tools to develop it, into .venv

# The install is editable: it maps each floor to its folder, so that edits and new modules count at once, and only a
# change of the dependencies or of the packages comes back here. setuptools goes first because the build is not
# isolated: an isolated one would download another setuptools.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "dslc needs Python 3.11 or newer, and '$(PYTHON)' is not one: make PYTHON=… names another" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (with torch: some minutes the first time)"
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(BIN)/python -c 'import torch.distributed.fsdp, torch.distributed.tensor'  # compiles what each rank imports
	@touch $@

run: $(STAMP) ## train examples/digits.plt; another job with JOB=… and ARGS=…
	$(BIN)/dslc run $(JOB) $(ARGS)

# CONTRIBUTING.md says which tests are in which tier. Three workers for two cores, as ranks wait for one another; files
# in the order of tests/conftest.py. mypy, one process, runs beside the tests.
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder
# RECORD=yes records the statements that each tier runs, for `make covered`.
RECORDS := build/coverage
recorded = $(if $(RECORD),mkdir -p $(RECORDS); rm -f $(RECORDS)/$@; \
  PYTHONPATH=$(CURDIR)/tests/instruments/coverage DSLC_COVERAGE=$(CURDIR)/$(RECORDS)/$@)

quick: $(STAMP) ## the tests of the language and the compiler that start no process, in a minute
	$(BIN)/pytest -n 2 --no-processes -m 'not processes and not slow and not long' tests/dsl tests/compiler $(PYTEST_ARGS)

test: lint ## ruff, mypy and the tests that cover the code; a part with PYTEST_ARGS=…
	@$(MAKE) --no-print-directory -j 2 types tests

tests: $(STAMP)
	$(recorded) $(PYTEST) -m 'not slow and not long' $(PYTEST_ARGS)

rest: $(STAMP) ## the tests that `make test` leaves out, but for the long ones
	$(recorded) $(PYTEST) -m 'slow and not long' $(PYTEST_ARGS)

test-all: ## `make test`, then the rest
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory rest

# Tests of collectives, exchanges, kills and restarts: all that launch ranks exchange, and these have little else.
EXCHANGING := tests/exchange tests/runtime/transport tests/runtime/parallel tests/runtime/pipeline \
  $(addprefix tests/runtime/,test_launch.py test_stall_watch.py measure/test_collectives_recorded.py \
    process/test_failure.py process/test_stop.py) \
  $(patsubst %,tests/training/test_%.py,axes collectives elastic elastic_pods equal_copies expert_axis faults \
    faults_on_hosts hosts kill launchers pipeline_jobs rank_agreement restart_faults restarts restarts_by_mpirun \
    restarts_on_hosts resume segments_left shared_memory_jobs slurm stall_cases whole_losses whole_losses_on_hosts)
SHARED := $(CURDIR)/tests/instruments/shared_memory

backends: $(STAMP) ## the tests of exchanges, kills and restarts over gloo, and over shared memory
	$(PYTEST) -m 'not long' $(EXCHANGING) $(PYTEST_ARGS)
	@mkdir -p build && rm -f build/shared-memory-groups
	PYTHONPATH=$(SHARED) DSLC_SHARED_MEMORY=$(CURDIR)/build/shared-memory-groups \
	  $(PYTEST) -m 'not long' $(EXCHANGING) $(PYTEST_ARGS)

lint: $(STAMP) ## ruff alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and mkdocstrings know neither package-dir nor the editable install. Both get the package as a folder of links; the
# paths that mypy reports are turned back into those of the checkout.
types: $(STAMP) linked ## mypy alone
	@echo mypy $(TYPES) $(wildcard tests benchmarks)
	@MYPYPATH=$(subst $(empty) $(empty),:,$(TESTS)) $(BIN)/mypy $(TYPES) $(wildcard tests benchmarks) \
	  | sed -E 's#$(TYPES)/(dsl|compiler|runtime|grammar)/#\1/#; s#$(TYPES)/#cli/#'

linked:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)
	@ln -s $(addprefix $(CURDIR)/,$(wildcard cli/*)) $(addprefix $(CURDIR)/,$(FLOORS)) $(TYPES)

# 97% of what both run.
covered: $(STAMP) ## the share of statements that `make test` runs, after RECORD=yes make test-all
	@PYTHONPATH=tests $(BIN)/python -m instruments.covered $(RECORDS)/tests $(RECORDS)/rest

slowest: $(STAMP) ## write the slowest tests of the last runs into CONTRIBUTING.md
	@PYTHONPATH=tests $(BIN)/python -m instruments.durations

long: $(STAMP) ## the full products and the hundred-run tests
	$(BIN)/pytest -m long --timeout 7200 $(PYTEST_ARGS)

bench: $(STAMP) ## the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

# Its tools come with the first build, not with `make install`: by pip, and for the planner of docs/planner by npm, of
# Node.js. A link or an anchor that leads nowhere fails the build.
docs: $(VENV)/.docs linked ## the documentation site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html is the first page; the planner needs a server: $(PYTHON) -m http.server -d build/site"

$(VENV)/.docs: $(STAMP)
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

rooms: $(STAMP) ## draw the rooms and their imports into CONTRIBUTING.md
	PYTHONPATH=tests $(BIN)/python -m helpers.rooms

clean: ## all that make created, .venv with it
	rm -rf $(VENV) build dist dslc.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
