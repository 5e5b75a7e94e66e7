# Each target alone does all its own set-up, from a fresh clone with nothing but Python (>= 3.11) and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test slow wheel clean

demo: .venv/.core
	$(BIN)/mispair demo --out demo

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

slow: .venv/.dev
	$(BIN)/pytest -m slow

wheel: .venv/.dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist demo src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/.dev: .venv/.core
	$(INSTALL) -e '.[dev]'
	touch $@
