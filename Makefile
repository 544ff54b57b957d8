# Every target sets up .venv first, when it is missing or requirements.txt has changed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: rehearse test benchmark lint prove setup clean

rehearse: setup
	$(BIN)/python launch/rehearse.py

test: setup
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

benchmark: setup
	$(BIN)/python -m tests.benchmarks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A hundred interruptions of all kinds, every run compared bit by bit: about 15 minutes.
prove: setup
	$(BIN)/python launch/rehearse.py --campaign 50 --seed 1
	$(BIN)/python launch/rehearse.py --campaign 50 --seed 2

setup: .venv/ready

.venv/ready: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

clean:
	rm -rf .venv out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
