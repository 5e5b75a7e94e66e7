# Each target alone does all its own set-up, from a fresh clone with nothing but Python (>= 3.11) and make.
PYTHON ?= python3
unexport PYTHONDONTWRITEBYTECODE # compiled once, not by every process of the tests
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST = $(BIN)/pytest -n 2 --dist worksteal
QUICK = tests/compute tests/pairs tests/functional tests/models tests/retrieval tests/support tests/training \
	tests/test_config.py tests/test_contracts.py tests/test_portable.py

.PHONY: demo test quick slow faults soak fuzz coverage format docs wheel clean FORCE

demo: .venv/.core
	$(BIN)/mispair demo --out demo

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(PYTEST)

# While you work: no methods, audits, comparisons, commands or kernels.
quick: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(PYTEST) $(QUICK) --ignore tests/models/kernels

slow: .venv/.dev
	$(BIN)/pytest -m slow

# For three minutes, in an order that the seed gives; `make faults FAULTS=` injects every fault, which takes hours.
FAULTS ?= --minutes 3
faults: .venv/.dev
	PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults $(FAULTS)

SOAK ?= --minutes 30
soak: .venv/.dev
	PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.soak $(SOAK)

fuzz: .venv/.dev
	PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ)

coverage: .venv/.dev
	$(PYTEST) --cov --cov-report term:skip-covered --cov-report html

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Measurements, listed in benchmarks/README.md: `make bench-audit ARGS="my_embeddings --noise-ratio 0.4"`.
bench-%: .venv/.dev FORCE
	$(BIN)/python benchmarks/bench_$(subst -,_,$*).py $(ARGS)

wheel: .venv/.dev
	$(BIN)/python -m build --wheel

FORCE:

clean:
	rm -rf .venv build dist demo site htmlcov src/*.egg-info .coverage* .*_cache .hypothesis

.venv/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[review]'
	touch $@

.venv/.dev: .venv/.core
	$(INSTALL) -e '.[dev]'
	touch $@

.venv/.docs: .venv/.core
	$(INSTALL) -e '.[docs]'
	touch $@
