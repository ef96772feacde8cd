# The same commands by hand and in continuous integration. `make help` lists them.
#
# A fresh machine needs Python >= 3.11 only; .venv is made on first use and again when pyproject.toml or constraints.txt change.
# `make test PY=/path/to/python` uses an environment that you keep yourself.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
STAMP := $(VENV)/.installed

ifeq ($(origin PY),undefined)
PY := $(abspath $(VENV))/bin/python
ENVIRONMENT := $(STAMP)
DOCS_ENVIRONMENT := $(VENV)/.docs-installed
endif

# Tests run in so many processes, each of which starts ranks of its own. On two cores a third one works while others wait.
WORKERS ?= 3

# Tests that need no machine code, and take about as long as to compile it: one process runs them meanwhile. Where all cases are run they
# would take hours.
APART ?= tests/tracing
test-all: export APART :=

# The tests start many processes on few cores; a thread pool in each would only make them wait for each other.
test test-all quick: export OMP_NUM_THREADS ?= 1

# Whoever first imports a module keeps its bytecode: a third of what is installed is ever imported. And pytest keeps what it has made of
# modules of tests: collecting takes 13 seconds of a core with it, 27 without. In a new checkout one process makes it while machine code is
# compiled, not each worker for itself.
PARSED := .pytest_cache/parsed
export PYTHONDONTWRITEBYTECODE :=

# How much of each suite: tests/extent.py, docs/testing.md
test: export SOAP_TESTS ?= test
test-all: export SOAP_TESTS ?= all
quick: export SOAP_TESTS ?= quick
test: export CHOSEN ?= -m "not long" --durations 30
test-all: export CHOSEN ?= --timeout 3600 --durations 100
quick: export CHOSEN ?= -m "not slow and not long"
TWO = $(MAKE) --no-print-directory -j 2
PYTEST = $(PY) -m pytest $(CHOSEN) -n $(WORKERS) --dist worksteal $(APART:%=--ignore=%)

.PHONY: help demo test test-all quick suite apart lint types machine-code wheel docs venv clean
.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

demo: $(ENVIRONMENT)  ## export a model, search, train with the found strategy on this machine's processes, check it
	$(PY) -m examples.demo

test: lint  ## what every change must pass: lint, types, tests (of each guarantee a part)
test-all: lint $(DOCS_ENVIRONMENT)  ## lint, types, and all tests with all their cases
quick: lint  ## `make test` without the slow tests
test test-all quick:
	@$(TWO) types apart suite

suite: machine-code
	$(PYTEST)

# What they have to say comes in one piece, as the suite's tests may run already.
apart: types $(PARSED)
	@[ -z "$(APART)" ] || { $(PY) -m pytest -q $(CHOSEN) $(APART) > $(PARSED).apart 2>&1 && cat $(PARSED).apart; } || { cat $(PARSED).apart >&2; exit 1; }

$(PARSED): $(ENVIRONMENT)
	@mkdir -p $(@D)
	@$(PY) -m pytest --collect-only -qq > $@.log || { tail -n 60 $@.log >&2; exit 1; }
	@mv $@.log $@

machine-code: $(ENVIRONMENT)  ## the simulator and the search, compiled once for all processes of the tests
	$(PY) -m tests.machine_code

lint: $(ENVIRONMENT)  ## style
	$(PY) -m ruff check .

types: $(ENVIRONMENT)  ## types of the package, strictly
	$(PY) -m mypy

wheel: $(ENVIRONMENT)  ## dist/*.whl, with the simulator and the search nearly compiled, which takes two minutes
	rm -f dist/*.whl
	$(PY) -m release.machine_code
	$(PY) -m build --wheel --no-isolation

docs: $(ENVIRONMENT) $(DOCS_ENVIRONMENT)  ## the pages as a site in build/site (to read it: python -m http.server -d build/site)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

venv: $(ENVIRONMENT)  ## the environment in .venv

$(STAMP): pyproject.toml constraints.txt
	@python=; for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then echo "make: no Python >= 3.11 found on PATH; install one, or name it: make venv PY=..." >&2; exit 1; fi; \
	[ -x $(VENV)/bin/python ] || $$python -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --upgrade pip || :  # older ones take twice as long to choose among all that there are
	$(VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test,plots,preprocess,elastic,report]'
	@touch $@

$(VENV)/.docs-installed: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

clean:  ## remove what was built, not the environment
	rm -rf build dist *.egg-info demo-output
