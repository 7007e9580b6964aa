# `make demo` runs the main job, `make test` checks everything; both set up what they need in .venv first.
# PYTHON=python3.12 make ... picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find src native -type f \
	\( -name '*.py' -o -name '*.typed' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.h' \))
NATIVE_BUILD := build/native-tests

.PHONY: demo test lint types native-test pytest clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/moedecode demo

test: lint types native-test pytest

lint: $(VENV)/.tools
	$(BIN)/ruff check src tests

types: $(VENV)/.tools
	$(BIN)/mypy

native-test: $(VENV)/.tools
	$(BIN)/cmake -S . -B $(NATIVE_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DCMAKE_BUILD_TYPE=Release -DMOEDECODE_PYTHON=OFF -DMOEDECODE_TESTS=ON > /dev/null
	$(BIN)/cmake --build $(NATIVE_BUILD)
	$(BIN)/ctest --test-dir $(NATIVE_BUILD) --output-on-failure

pytest: $(VENV)/.tools $(VENV)/.installed
	$(BIN)/python -m pytest

# The package as a user gets it: one wheel with the native core, and the commands.
$(VENV)/.installed: $(VENV)/.created $(SOURCES)
	@echo "building and installing moedecode (about a minute the first time) ..."
	$(PIP) install --force-reinstall --no-deps .
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
