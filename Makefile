# Everything runs inside .venv, which is made when it is missing. CPU machines get the CPU build of torch.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(wildcard native/*.cpp native/*.h native/*.inc) CMakeLists.txt pyproject.toml
SYSTEM_TOOLS := strace mkfs.ext4

.PHONY: train selfcheck test check build format clean system-tools

train: build
	$(BIN)/python -m greedysnake train

selfcheck: build
	$(BIN)/python -m greedysnake selfcheck

test: build system-tools check
	$(BIN)/python -m pytest -n auto --maxprocesses 8

check: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror native/*.cpp native/*.h

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i native/*.cpp native/*.h

build: .venv/.built

.venv/.installed: constraints.txt requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt pip
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -r requirements.txt
	touch $@

.venv/.built: .venv/.installed $(NATIVE)
	$(BIN)/pip install -q --no-build-isolation --no-deps -C cmake.define.GREEDYSNAKE_WERROR=ON -e .
	touch $@

# The fault tests need strace and mkfs.ext4; as root on Debian they are installed here, elsewhere those tests are skipped.
system-tools:
	@missing=""; for tool in $(SYSTEM_TOOLS); do PATH="$$PATH:/sbin:/usr/sbin" command -v $$tool >/dev/null || missing=1; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq strace e2fsprogs >/dev/null; fi

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
