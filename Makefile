# Every target sets up what it needs: a virtual environment in .venv with the versions of deploy/constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint deploy/constraints.txt
# The editable install is a tree of links, one a file: it is renewed when a file comes, goes or moves.
FILES  := $(shell git ls-files --cached --others --exclude-standard -- cloud common edge protos 2>/dev/null | sort | cksum | cut -d' ' -f1)
STAMP  := $(VENV)/.installed-$(FILES)

.PHONY: help demo test check sweep wheel bench bench-sim protos clean
.DEFAULT_GOAL := help

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMP)  ## A whole fleet on this machine: coordinator, two-rank site, six edge nodes (about 2 minutes; ARGS="--out DIR")
	$(BIN)/fleetddp demo $(ARGS)

test: $(STAMP)  ## All tests (ARGS="-k name" narrows)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)  ## Lint, types, generated stubs, shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy -p fleetddp.common -p fleetddp.cloud -p fleetddp.edge
	PYTHON=$(PYTHON) deploy/protos.sh --check

sweep: $(STAMP)  ## A thousand simulated fleets in which everything goes wrong (ARGS="--seed 7" runs one again)
	$(BIN)/python tests/sim/sweep.py $(ARGS)

wheel: $(STAMP)  ## Build a wheel and run it in a clean virtual environment, outside the checkout
	PYTHON=$(PYTHON) deploy/wheel-check.sh

bench: $(STAMP)  ## The benchmarks of a real fleet (tests/bench); the last line of each is its figures as JSON
	set -e; for name in startup step_overhead ingest recovery root_traffic site_hierarchy diloco cascade distill closed_loop; do echo "== $$name"; $(BIN)/python tests/bench/$$name.py; done

bench-sim: $(STAMP)  ## The benchmarks of the simulator; peers run where tests/bench/peers/setup.sh installed them
	set -e; for name in sim_timing sim_training policies; do echo "== $$name"; $(BIN)/python tests/bench/$$name.py; done

protos:  ## Generate the stubs of protos/fleet.proto again
	PYTHON=$(PYTHON) deploy/protos.sh

clean:  ## Remove the virtual environment and what was built
	rm -rf $(VENV) build dist *.egg-info runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml deploy/constraints.txt | $(VENV)/bin/python
	rm -f $(VENV)/.installed-*
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[dev]' --config-settings editable_mode=strict
	touch $@
