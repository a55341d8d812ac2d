# `make setup` makes .venv; every other target makes it first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-all lint bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/flowcheck demo

test: setup
	$(BIN)/pytest -m 'not slow'

test-all: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/roce.py
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) build dist *.egg-info
