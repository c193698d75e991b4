# Two commands: `make join` runs a node, `make test` passes the tests. Each sets up what it needs, once.
# ARGS goes to the command: make join ARGS="--rounds 60 --seed 0"

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: join swarm test check format clean

join: $(VENV)/.train
	@$(BIN)/swarmnode join $(ARGS)

swarm: $(VENV)/.train
	@$(BIN)/swarmnode swarm $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing swarmnode (once; torch is large, this takes a minute or two)"
	@$(BIN)/python -m pip install -q -e ".[train]" -c constraints.txt
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.train
	@echo "installing the tools for tests and checks (once)"
	@$(BIN)/python -m pip install -q -e ".[train,dev]" -c constraints.txt
	@touch $@
