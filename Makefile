# Commands for a fresh machine:
#
#   make train            make the environment, run the main job, print where its results are
#   make train-agentic    the same for the multi-turn job
#   make test             make the environment, run every check and test
#
# Both need Python 3.11 or newer, make and a package index. The environment is the folder .venv; it is made once and brought up to date when
# pyproject.toml changes. To begin afresh, delete it.
#
#   PYTHON=python3.12            the Python to make the environment with; default: the first one that is new enough
#   RECIPE=recipes/other.yaml    what `make train` runs
#   ARGS='seed=1 trainer.max_steps=10'    overrides and options for it
#   WORKERS=4                    processes that run tests; default: one for each core, at most 8 (each imports torch, half a gigabyte)
#   TORCH='torch==2.13.0'        handed to pip as it is, before anything else is installed, so that no other package chooses the build of
#                                torch. 2.13.0 is the tested version. A machine with a GPU may want another build, and one without may want
#                                to spare itself the GPU libraries: give a version, a wheel file, or pip's options for another index here.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
RECIPE ?= recipes/rlvr_arithmetic.yaml
ARGS ?=
WORKERS ?= logical
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train train-agentic test environment format
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(BIN)/sluice train $(RECIPE) $(ARGS)

train-agentic: $(VENV)/.installed
	$(BIN)/sluice train recipes/agentic_household.yaml $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# What `make test` would complain about and a tool can put right.
format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

environment: $(VENV)/.installed-dev

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "error: expected Python 3.11 or newer, found $$(python3 --version 2>&1 || echo none)" \
		"- install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: expected Python 3.11 or newer, PYTHON=$(PYTHON) is" \
		"$$($(PYTHON) --version 2>&1) - name another one, or leave PYTHON away"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "error: $(PYTHON) lacks the module venv or ensurepip" \
		"- install it (Debian and Ubuntu: apt install python3-venv), or name another Python: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.made
	$(PIP) install $(TORCH)
	$(PIP) install -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed
	$(PIP) install -e '.[train,dev,report]'
	-$(PIP) install -e '.[agentic]' # where it cannot be built the tests of these environments are skipped
	@touch $@
