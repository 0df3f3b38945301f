# Every target makes .venv when it is not there. The tested versions are in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
CMAKE := $(or $(shell command -v cmake),$(BIN)/cmake)
MAKEFLAGS += --no-print-directory
NATIVE_TESTS := tests/test_build.py tests/test_cache_in_place.py $(wildcard tests/test_native*.py)

.PHONY: help demo test check format bench native sanitize clean

help:
	@echo "make demo    train a small GPT made of Attention for about a minute, on text that is already here,"
	@echo "             then the same model on torch's layer beside it"
	@echo "make test    run the tests"
	@echo "make check   formatting, lint, types, import direction"
	@echo "make bench   measure multihead against torch, about twenty minutes"
	@echo "make format  format the code"
	@echo "make native  build the native library alone, into build/native, and show what the compiler says"
	@echo "make sanitize  build it with the sanitizers of GCC, for memory and for threads, and run its tests with each"
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
	$(BIN)/python benchmarks/native.py
	$(BIN)/python benchmarks/module.py
	$(BIN)/python benchmarks/choice.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/memory.py

native: $(CMAKE)
	$(CMAKE) -S . -B build/native
	$(CMAKE) --build build/native --parallel

# The sanitizers have to be in memory before Python is. Reports go to stderr as it is, so pytest must not catch that.
sanitize: $(STAMP) $(CMAKE)
	$(CMAKE) -S . -B build/sanitize/address -DMULTIHEAD_SANITIZE=address,undefined -DCMAKE_CXX_COMPILER=$(CXX)
	$(CMAKE) --build build/sanitize/address --parallel
	ASAN_OPTIONS=detect_leaks=0 MULTIHEAD_LIBRARY=$(CURDIR)/build/sanitize/address/libmultihead_native.so \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest --capture=sys $(NATIVE_TESTS)
	$(CMAKE) -S . -B build/sanitize/thread -DMULTIHEAD_SANITIZE=thread -DCMAKE_CXX_COMPILER=$(CXX)
	$(CMAKE) --build build/sanitize/thread --parallel
	TSAN_OPTIONS=ignore_noninstrumented_modules=1 OMP_NUM_THREADS=1 \
	MULTIHEAD_LIBRARY=$(CURDIR)/build/sanitize/thread/libmultihead_native.so \
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so) $(CURDIR)/build/sanitize/thread/libthreads.so" \
	$(FIXED_ADDRESSES) $(BIN)/python -m pytest --capture=sys $(NATIVE_TESTS)

# The thread sanitizer of older compilers does not start where addresses are drawn at random from too large a range.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

$(BIN)/cmake: | $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check cmake

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "multihead needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'from multihead.kernels import library as l; print("native library:", l.why_not() or l.isa())'
	touch $(STAMP)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
