# make demo    the whole job on a small real model, printed as a table
# make leaderboard    every recipe at three rates on that model; results/leaderboard/report
# make test    environment, lint, types and every test; what CI runs
# make test-long    the table of families, fuzzers, long use: half an hour; LONG_MINUTES=30 for each fuzzer
# make lint    ruff and pyright only          make env     the environment only (.venv)
# make format  let ruff rewrite               make clean   remove what make made here
# make docs    the site, into build/site/index.html; a warning is an error
# make packages    wheel and sdist, installed with each extra; LOWEST=1 with the lowest versions (minutes, GB)
# make test-serving    its own environment with vLLM (CPU build) and LMCache, and the tests that run them
#
# PYTHON=python3.12 chooses an interpreter; PYTEST_ARGS='-m "not model"' goes to pytest, DEMO_ARGS to the demo.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help env test test-long lint types format docs packages demo leaderboard env-serving test-serving clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-pyproject-and-constraints
TOOLS := $(VENV)/.tools-from-pyproject-and-constraints
SITE_TOOLS := $(VENV)/.docs-from-pyproject-and-constraints
SERVING := .venv-serving
SERVING_STAMP := $(SERVING)/.made-from-requirements
EXTRAS := hf,cpu,plots,monitoring,redis,urls
TOOL_EXTRAS := eval,dev
PYTEST_ARGS ?=
DEMO_ARGS ?=
LEADERBOARD_ARGS ?= --jobs 2
LONG_MINUTES ?= 2
PIP := $(BIN)/python -m pip --no-input --disable-pip-version-check

help:
	@sed -n '1,/^$$/{s/^# \{0,1\}//p}' Makefile

comma := ,
define install
	@echo "env: installing karhunen[$(1)] into $(VENV): $(2)"
	@echo "env: pip's words go to $(VENV)/install.log"
	@{ $(PIP) install -c constraints.txt pip && $(PIP) install -c constraints.txt -e '.[$(1)]'; } \
	  >>$(VENV)/install.log 2>&1 </dev/null || { \
	    echo "env: pip failed; its last lines:" >&2; tail -n 15 $(VENV)/install.log >&2; exit 1; }
endef

env: $(TOOLS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null || { \
	  echo "karhunen needs Python 3.11 or newer; '$(PYTHON)' is not: try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 </dev/null || { \
	  echo "env: creating $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV) </dev/null || { \
	    echo "env: '$(PYTHON) -m venv' failed; on Debian and Ubuntu it is the package python3-venv" >&2; exit 1; }; }
	$(call install,$(EXTRAS),torch is large$(comma) so the first time takes minutes)
	@$(BIN)/python -c 'import torch, transformers; \
	  print(f"env: ready: torch {torch.__version__}, transformers {transformers.__version__}")' </dev/null
	@touch $@

$(TOOLS): $(STAMP)
	$(call install,$(EXTRAS)$(comma)$(TOOL_EXTRAS),what tests need)
	@touch $@

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) </dev/null

test-long: $(TOOLS)
	$(BIN)/python -m benchmarks.families --redo </dev/null
	for target in artifact page statistics results; do \
	  $(BIN)/python -m benchmarks.fuzz $$target --minutes $(LONG_MINUTES) --start $$RANDOM </dev/null; done
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$$(mktemp -d) \
	  $(BIN)/python -m benchmarks.fuzz artifact --minutes $(LONG_MINUTES) </dev/null
	$(BIN)/python -m benchmarks.soak </dev/null

lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)
	$(BIN)/pyright --level error

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(SITE_TOOLS): $(TOOLS)
	$(call install,docs,what the site needs)
	@touch $@

docs: $(SITE_TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build </dev/null

packages:
	PYTHON=$(PYTHON) .ci/check_packages

demo: $(STAMP)
	$(BIN)/karhunen demo $(DEMO_ARGS)

leaderboard: $(STAMP)
	$(BIN)/karhunen leaderboard $(LEADERBOARD_ARGS)

env-serving: $(SERVING_STAMP)

$(SERVING_STAMP): requirements-serving.txt pyproject.toml
	@$(SERVING)/bin/python -m pip --version >/dev/null 2>&1 </dev/null || $(PYTHON) -m venv --clear $(SERVING) </dev/null
	@echo "env-serving: installing vLLM and LMCache into $(SERVING): minutes, and 2 GB; pip's words go to $(SERVING)/install.log"
	@{ $(SERVING)/bin/python -m pip --no-input install --no-deps -r requirements-serving.txt && \
	   $(SERVING)/bin/python -m pip --no-input install --no-deps -e .; } >>$(SERVING)/install.log 2>&1 </dev/null || { \
	    echo "env-serving: pip failed; its last lines:" >&2; tail -n 15 $(SERVING)/install.log >&2; exit 1; }
	@touch $@

test-serving: $(SERVING_STAMP)
	$(SERVING)/bin/python -m pytest tests/serving $(PYTEST_ARGS) </dev/null

clean:
	rm -rf $(VENV) $(SERVING) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
