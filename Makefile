# `make demo` runs the main job, `make test` checks everything; both set up what they need in .venv first.
# PYTHON=python3.12 make ... picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find src native -type f \
	\( -name '*.py' -o -name '*.typed' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.h' \))
PYTEST_ARGS ?= -n auto

.PHONY: demo test bench lint types pytest clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/moedecode demo

test: lint types pytest

lint: $(VENV)/.tools
	$(BIN)/ruff check src tests benchmarks

types: $(VENV)/.tools
	$(BIN)/mypy

pytest: $(VENV)/.tools $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest $(PYTEST_ARGS)

# GB/s of every operation, some minutes; `moedecode bench` is for whole layers and peers. On a quiet machine.
bench: $(VENV)/.tools $(VENV)/.installed
	$(BIN)/python -m pytest benchmarks -p no:randomly

# The package as a user gets it: one wheel with the native core, and the commands.
$(VENV)/.installed: $(VENV)/.created $(SOURCES)
	@echo "building and installing moedecode (about a minute the first time) ..."
	$(PIP) install '.[cli]'
	@touch $@

$(VENV)/.tools: $(VENV)/.created requirements-dev.txt
	@echo "installing the tools of the tests ..."
	$(PIP) install -r requirements-dev.txt
	@touch $@

$(VENV)/.created:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "moedecode needs Python 3.10 or newer"'
	$(PYTHON) -m venv $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
