# The two commands a newcomer needs: make serve, make test. Both make .venv first; all they ask for is Python 3.12 or newer.

MODEL ?= demo
HOST ?= 127.0.0.1
PORT ?= 8000
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CANDIDATES := $(PYTHON) python3.12 $(lastword $(sort $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python))) \
	python3.13 python3.14 python3

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test lint format bench clean

help: ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile
	@echo "Variables: MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT) PYTHON=... ARGS=..."

serve: $(VENV)/.base ## serve MODEL (a path, or demo) on HOST:PORT
	$(BIN)/glmjax serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.dev ## run the tests, in WORKERS processes; ARGS goes to pytest
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## run the benchmark scripts, or one: BENCH=benchmarks/NAME.py
	@set -e; for script in $(or $(BENCH),$(wildcard benchmarks/*.py)); do \
		echo "$$script"; $(BIN)/python "$$script" $(ARGS); done

clean: ## remove what builds, tests and caches left; .venv stays
	rm -rf build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find glmjax kernels sharding serving tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in $(CANDIDATES); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
			echo "Making $(VENV) with $$python"; exec "$$python" -m venv $(VENV); \
		fi; \
	done; \
	echo "No Python 3.12 or newer found: install one, or name it with make PYTHON=/path/to/python3.12" >&2; exit 1

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing glmjax into $(VENV)"
	@$(PIP) install --editable . --constraint constraints.txt
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing glmjax and its test tools into $(VENV)"
	@$(PIP) install --editable '.[dev,aot]' --constraint constraints.txt
	@# NIXL is for Linux, and does without the torch that it names as a requirement.
	@test "$$(uname -s)" != Linux || $(PIP) install --no-deps nixl-cu12 --constraint constraints.txt
	@touch $(VENV)/.base $@
