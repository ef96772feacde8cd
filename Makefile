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
endif

# Tests run in so many processes, each of which starts ranks of its own.
WORKERS ?= 2

# The tests start many processes on few cores; a thread pool in each would only make them wait for each other.
test test-all quick: export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all quick lint types wheel venv clean
.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

demo: $(ENVIRONMENT)  ## export a model, search, train with the found strategy on this machine's processes, check it
	$(PY) -m examples.demo

test: lint types  ## what every change must pass: lint, types, tests (with a wheel built and imported)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not long"

test-all: lint types  ## the same with the tests that take minutes each
	$(PY) -m pytest -n $(WORKERS) --dist worksteal --timeout 3600

quick: lint types  ## `make test` without the slow tests
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m "not slow and not long"

lint: $(ENVIRONMENT)  ## style
	$(PY) -m ruff check .

types: $(ENVIRONMENT)  ## types of the package, strictly
	$(PY) -m mypy

wheel: $(ENVIRONMENT)  ## dist/*.whl
	$(PY) -m build --wheel --no-isolation

venv: $(ENVIRONMENT)  ## the environment in .venv

$(STAMP): pyproject.toml constraints.txt
	@python=; for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then echo "make: no Python >= 3.11 found on PATH; install one, or name it: make venv PY=..." >&2; exit 1; fi; \
	[ -x $(VENV)/bin/python ] || $$python -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,plots]'
	@touch $@

clean:  ## remove what was built, not the environment
	rm -rf build dist *.egg-info demo-output
