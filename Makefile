# Rollwise: `make` lists the targets.
#   PYTHON=python3.12   the interpreter that .venv is made from (3.11 or newer)
#   TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu   an extra index, to get the small CPU build of torch on Linux

SHELL := /bin/sh
PYTHON ?= python3
TORCH_INDEX_URL ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VERL_VENV := .venv-verl
VERL_BIN := $(VERL_VENV)/bin
VERL_STAMP := $(VERL_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo study test test-fast test-verl docs lint format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv and install Rollwise with the tested versions of everything

# Runs once, and again when the dependencies change.
$(STAMP): pyproject.toml constraints.txt
	@if ! version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then \
	  echo "Rollwise needs Python 3.11 or newer, but '$(PYTHON)' does not run. Name one: make setup PYTHON=python3.12" >&2; exit 1; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "Rollwise needs Python 3.11 or newer, but '$(PYTHON)' is $$version. Name another: make setup PYTHON=python3.12" >&2; exit 1; \
	fi
	@echo "Installing into $(VENV): about 2 GB with the CPU build of torch, a few minutes the first time."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) -e '.[trl,dev]'
	@touch $@

demo: setup ## Train a small model with Rollwise and without it, on the CPU, and compare the two
	$(BIN)/rollwise train examples/arithmetic_all.yaml --baseline

STUDY_SEEDS := 1 2 3 4 5 6 7 8

study: setup ## Make the headline study again: about five hours on 2 cores, and it goes on where it was stopped
	@for seed in $(STUDY_SEEDS); do \
	  test -f runs/headline_bases/$$seed/pretrain.json || \
	    $(BIN)/rollwise pretrain runs/headline_bases/$$seed --seed $$seed --num-threads 1 || exit 1; \
	  test -f runs/countdown_bases/$$seed/pretrain.json || $(BIN)/rollwise pretrain \
	    runs/countdown_bases/$$seed --task countdown --seed $$seed --num-threads 1 || exit 1; \
	done
	$(BIN)/rollwise study benchmarks/headline.yaml
	$(BIN)/rollwise study benchmarks/headline_countdown.yaml
	$(BIN)/rollwise study benchmarks/headline_countdown_wide.yaml
	$(BIN)/rollwise report runs/headline
	$(BIN)/rollwise report runs/headline_countdown
	$(BIN)/rollwise report runs/headline_countdown_wide

test: setup ## Run all tests, the slow ones too
	$(BIN)/python -m pytest -n auto

test-fast: setup ## Run the tests that take seconds
	$(BIN)/python -m pytest -n auto -m "not slow"

test-verl: $(VERL_STAMP) ## Run the tests of the verl adapter, with verl's whole loop on the CPU, in .venv-verl
	$(VERL_BIN)/python -m pytest -W default tests/verl

# 2 GB, in an environment of its own: verl wants other versions than TRL.
$(VERL_STAMP): pyproject.toml constraints-verl.txt
	@$(VERL_BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VERL_VENV)
	$(VERL_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-verl.txt \
	  $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) -e '.[verl]' pytest hypothesis
	@touch $@

docs: setup ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

lint: setup ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, builds and caches (runs/ stays)
	rm -rf $(VENV) $(VERL_VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
