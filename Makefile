PYTHON ?= python3
BIN := .venv/bin
# One stamp for the whole set-up: whatever decides what is installed is a prerequisite of it.
STAMP := .venv/.installed
BENCH := .venv/.bench

.DEFAULT_GOAL := help
.PHONY: help setup demo test simulate chaos lint format bench \
	bench-peers bench-control bench-redone bench-scaling bench-gpu

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP)  ## A virtual environment in .venv with everything that demo and test need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rescore needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $@

demo: $(STAMP)  ## Score the standard library's docstrings with real weights, and look at the result
	@$(BIN)/python -m jobs.demo prepare
	@$(BIN)/rescore run configs/demo.yaml; code=$$?; test $$code -eq 0 -o $$code -eq 3 || exit $$code
	@$(BIN)/python -m jobs.demo show

test: $(STAMP)  ## The whole test suite
	$(BIN)/python -m pytest

SEEDS ?= 100000
simulate: $(STAMP)  ## The scheduler through SEEDS seeded failures (100000: some minutes); prints how to replay one
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs 2

lint: $(STAMP)  ## Linter, formatter, type checker, import walls
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: $(STAMP)  ## Real kill -9 of workers, drivers and nodes, at full length (about 25 minutes); prints a table
	$(BIN)/python -m tests.chaos

$(BENCH): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev,bench]'
	@touch $@

bench: bench-peers bench-control bench-redone bench-scaling  ## All benchmarks on CPUs (about 50 minutes on a quiet machine)

bench-peers: $(BENCH)  ## Documents per second: predict loops, Ray Data, rescore, and the ceiling
	@$(BIN)/python -m tests.benchmarks.peers

bench-control: $(BENCH)  ## A ranker that costs nothing over a million documents
	@$(BIN)/python -m tests.benchmarks.control_plane

bench-redone: $(BENCH)  ## Work that is done again after a kill -9 at 60 %
	@$(BIN)/python -m tests.benchmarks.redone

bench-scaling: $(BENCH)  ## 1 worker, 2 workers, 1 worker of 2 CPUs
	@$(BIN)/python -m tests.benchmarks.scaling

bench-gpu: $(BENCH)  ## On a machine with a GPU: how much of it is used
	@$(BIN)/python -m tests.benchmarks.gpu
