# Every target makes .venv when it is not there. The tested versions are in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help demo test check format bench clean

help:
	@echo "make demo    train a small GPT made of Attention for about a minute, on text that is already here,"
	@echo "             then a small model of torch's layer beside the same with the drop-in swapped in"
	@echo "make test    run the tests"
	@echo "make check   formatting, lint, types, import direction"
	@echo "make bench   measure multihead against torch, about ten minutes"
	@echo "make format  format the code"
	@echo "make clean   remove .venv and caches"

demo: $(STAMP)
	$(BIN)/multihead demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/module.py
	$(BIN)/python benchmarks/choice.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/memory.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "multihead needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
