# make demo and make test do all the set-up they need; both work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEEL := .venv-wheel

.PHONY: demo test lint types tests wheel clean

demo: $(VENV)/ready
	$(BIN)/exhume demo

test: lint types tests wheel

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/ready
	$(BIN)/mypy

tests: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 4 --dist loadfile

# The wheel away from the source tree, in an environment that borrows what it depends on from .venv.
# Path files of a borrowed folder are not read, so the editable install there stays out of sight.
wheel: $(VENV)/ready
	rm -rf dist $(WHEEL)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > $$(ls -d $(WHEEL)/lib/python3*/site-packages)/borrowed.pth
	$(PYTHON) tests/wheel_smoke.py $(WHEEL)

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(WHEEL) dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
