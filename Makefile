# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone with Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
VLLM   ?= .vllm

.PHONY: help setup demo quick test test-full vllm check lint types layers fix docs validation bench clean

help:
	@echo "make demo       the main job: a plan from the embedded catalog (no server, no downloads of models)"
	@echo "make test       all tests but the longest, with a reduced set against real vLLM"
	@echo "make quick      the fast tests alone"
	@echo "make test-full  everything"
	@echo "make check      ruff, mypy --strict, import-linter"
	@echo "make docs       generated pages (CLI reference, memory table)"
	@echo "make validation the golden summary and docs/validation.md, after predictions have moved on purpose"
	@echo "make bench      the benchmarks, with the figures they print"

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "bstar needs Python 3.11 or newer: make PYTHON=python3.12 …"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/bstar plan llama-3.1-8b --gpu h100-sxm-80gb,a100-sxm-80gb,l40s --input 2000 --output 500 --rate 10 --slo ttft=1s,tpot=50ms --attainment 0.95

quick: setup
	$(BIN)/python -m pytest -n auto -m "not slow and not vllm and not full"

vllm: $(VLLM)/.done

$(VLLM)/.done: tools/setup_vllm.sh
	bash tools/setup_vllm.sh $(VLLM)
	@touch $@

test: setup vllm
	$(BIN)/python -m pytest -n auto -m "not vllm and not full"
	BSTAR_VLLM_VENV=$(abspath $(VLLM)) $(BIN)/python -m pytest -m "vllm and not full"

test-full: setup vllm
	$(BIN)/python -m pytest -n auto -m "not vllm"
	BSTAR_VLLM_VENV=$(abspath $(VLLM)) $(BIN)/python -m pytest -m vllm

check: lint types layers

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

fix: setup
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python tools/make_cli_reference.py
	$(BIN)/python tools/memory_report.py --write
	$(BIN)/python tools/memory_heldout.py --write
	$(BIN)/python tools/update_docs.py

bench: setup
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/landmarks.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/step_times.py
	$(BIN)/python benchmarks/validate.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/measured_requests.py --calibrate

# After a change that moves predictions on purpose: the sample that `make test` compares with, and the page (minutes).
validation: setup
	$(BIN)/python tools/golden_summary.py --update
	$(BIN)/bstar validate --page docs/validation.md

clean:
	rm -rf $(VENV) $(VLLM) dist build .mypy_cache .ruff_cache .hypothesis .import_linter_cache
