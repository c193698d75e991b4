"""Looks at a machine the way a patient colleague would: facts first, then what to do, in order.

hardware, paths, config -> [examine] -> `swarmnode doctor`
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from swarmnode import __version__
from swarmnode.engine_record import by_preference
from swarmnode.errors import ConfigError, EngineError, ModelError, SwarmnodeError
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.machine.hardware import GIB, Card, Machine, find_card, free_disk_bytes, inspect_machine
from swarmnode.machine.installing import how_to_install
from swarmnode.machine.ports import check_status_port, choose_port
from swarmnode.machine.storage import Paths
from swarmnode.models import folder_of
from swarmnode.network.admission import admission_to
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.network.streams import transport_of
from swarmnode.node.building.machine_memory import PlannedMemory, longest_sequence, plan_for
from swarmnode.node.building.node_process import read_running
from swarmnode.node.building.page_client import ask_status
from swarmnode.node.building.policies import check_policies, config_of
from swarmnode.registry import find, names
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings
from swarmnode.tasks.data_settings import specs_of
from swarmnode.tasks.loader import load_tasks

Verdict = Literal["ok", "note", "problem"]

PACKAGES = ("torch", "transformers", "peft", "safetensors", "hivemind")
LEAST_DISK_BYTES = 200 * 2**20
"""Checkpoints of the tiny policy are 1 MB; logs and an update of the cache fit beside them."""
LEAST_MEMORY_BYTES = 2 * 2**30
"""torch and transformers take about 0.5 GiB, the tiny policy and its KV cache the same again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `advice` is empty when there is nothing to do."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Everything that decides whether `join` will work here."""
    config, model, paths = settings.config, settings.model, settings.paths
    machine, card = inspect_machine(), find_card(config.policy.device)
    used = machine if card.gpu is not None else replace(machine, gpus=())
    return [
        *_versions(machine),
        _memory(machine),
        gpu_finding(machine, card),
        *engine_findings(used),
        Finding("model", "ok", f"{model} ({settings.model_reason})"),
        *model_findings(config, model),
        # A member of a pipeline holds a part of the model.
        *(() if config.pipeline.name else memory_findings(plan_for(config, model))),
        *_folders(paths),
        transport_finding(config.network.transport),
        tried("swarm", partial(_swarm, config, paths)),
        *policy_findings(config, paths),
        *(finding for name in names("check") for finding in find("check", name)(config, used)),
        *reach_findings(paths),
        _clock(),
    ]


def transport_finding(name: str) -> Finding:
    """Returns the finding on the transport of this name: whether its host can be made here."""
    if name == "p2pd":
        return tried("daemon", lambda: str(find_daemon()))
    return tried("transport", lambda: f"{name}, a {type(transport_of(name)).__name__}")


def _swarm(config: Config, paths: Paths) -> str:
    """Tells if strangers can take part in the swarm that this home joins."""
    name = config.swarm.name
    admission = admission_to(paths, name)
    if admission is None:
        return f"{name} is public: anyone who names it can take part"
    founder = memorable_name(admission.founder)
    return f"{name} is private: anyone with its key can take part; founded by {founder}"


def policy_findings(config: Config, paths: Paths) -> Iterator[Finding]:
    """Yields findings on each policy: its tasks must load, and its ports must be free."""
    several = config.node.policies > 1
    try:
        check_policies(config)
        for number in range(config.node.policies):
            who = f" {number}" if several else ""
            own, place = config_of(config, number), paths.policy(number)
            yield tried(f"tasks{who}", partial(_tasks, own))
            yield tried(f"port{who}", partial(_port, own, place))
    except ConfigError as error:
        yield Finding("policies", "problem", error.message, error.hint)


def model_findings(config: Config, model: str) -> Iterator[Finding]:
    """Yields findings on a model that is on this disk: the engine that will run it, the layers that LoRA will
    change, and answers that leave no room for a prompt."""
    folder = folder_of(model)
    if folder is None or any(_version(name) is None for name in ("torch", "transformers", "peft")):
        return
    from swarmnode.node.building.look_ahead import look_ahead

    try:
        ahead = look_ahead(config, str(folder), policies=config.node.policies)
    except (EngineError, ModelError) as error:
        yield Finding("engine", "problem", error.message, error.hint)
        return
    if ahead is not None:
        record, reason = ahead.engine
        yield Finding("engine", "ok", f"{record.name}: {reason}")
        yield Finding("LoRA", "ok", ahead.targets.describe())
        try:
            longest_sequence(config, model, ahead.max_positions)
        except ConfigError as error:
            yield Finding("answers", "problem", error.message, error.hint)


def memory_findings(planned: PlannedMemory) -> Iterator[Finding]:
    """The arithmetic of the model against what is free here, and what follows for training."""
    verdict: Verdict = "note" if planned.fits is None else "ok" if planned.fits else "problem"
    yield Finding("memory plan", verdict, planned.describe(), planned.advice)
    if planned.budget is not None:
        yield Finding("micro-batch", "ok" if planned.budget.fits else "note", planned.budget.reason)


def _versions(machine: Machine) -> Iterator[Finding]:
    where = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {machine.cpu}"
    yield Finding("machine", "ok", f"swarmnode {__version__} on {where}, {machine.cores} cores")
    found = {name: _version(name) for name in PACKAGES}
    missing = [name for name, number in found.items() if number is None]
    text = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    advice = f"install what training needs: {how_to_install('train')}" if missing else ""
    yield Finding("versions", "problem" if missing else "ok", text, advice)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory(machine: Machine) -> Finding:
    text = f"{machine.memory_free_bytes / GIB:.1f} of {machine.memory_total_bytes / GIB:.1f} GiB free"
    if machine.memory_free_bytes < LEAST_MEMORY_BYTES:
        return Finding(
            "memory", "problem", text, f"free memory: a node needs {LEAST_MEMORY_BYTES / GIB:.0f} GiB"
        )
    return Finding("memory", "ok", text)


def gpu_finding(machine: Machine, card: Card) -> Finding:
    """The cards that the driver shows, and whether torch can use the one it would take."""
    if not machine.gpus:
        return Finding("gpu", "note", "none found: the CPU trains the tiny policy or small models")
    text = ", ".join(
        f"{gpu.name} ({(gpu.memory_free_bytes or 0) / GIB:.1f} GiB free)" for gpu in machine.gpus
    )
    if card.problem:
        return Finding("gpu", "problem", f"{text}; {card.problem}", card.advice)
    if card.gpu is None:
        return Finding("gpu", "note", f"{text}; not used, because of policy.device or CUDA_VISIBLE_DEVICES")
    taken = f"; {card.gpu.name} is used" if len(machine.gpus) > 1 else ""
    return Finding("gpu", "ok", text + taken)


def engine_findings(machine: Machine) -> Iterator[Finding]:
    """Says of each engine that has to be installed whether it is, and whether that would pay here."""
    device = "cuda" if machine.gpus else "cpu"
    for record in by_preference(device):
        missing, pays = record.missing(device), record.fastest_on.get(device)
        if missing is not None:
            advice = f"on {device} {pays}: {record.install}" if pays else ""
            yield Finding(record.name, "note", f"{missing}: rollouts come from another engine", advice)
        elif record.install:
            yield Finding(record.name, "ok", f"can be used on {device}")


def _folders(paths: Paths) -> Iterator[Finding]:
    for subject, folder in (("data", paths.data), ("cache", paths.cache)):
        free = free_disk_bytes(folder)
        text = f"{folder} ({free / GIB:.1f} GiB free)"
        if not _writable(folder):
            yield Finding(
                subject, "problem", text, f"{folder} cannot be written: change its owner, or use --home DIR"
            )
        elif free < LEAST_DISK_BYTES:
            yield Finding(
                subject, "problem", text, f"free at least {LEAST_DISK_BYTES / 2**20:.0f} MB in {folder}"
            )
        else:
            yield Finding(subject, "ok", text)


def _writable(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(existing, os.W_OK | os.X_OK)


def tried(subject: str, find: Callable[[], str]) -> Finding:
    """Returns what was found, or the error that it led to, with its advice.

    >>> tried("clock", lambda: "synchronized").verdict
    'ok'
    """
    try:
        return Finding(subject, "ok", find())
    except SwarmnodeError as error:
        return Finding(subject, "problem", error.message, error.hint)


def _tasks(config: Config) -> str:
    return ", ".join(task.name for task in load_tasks(specs_of(config.tasks)))


def _port(config: Config, paths: Paths) -> str:
    if (running := read_running(paths.running)) is not None:
        return f"a node runs here (process {running.pid}): {', '.join(running.addresses)}"
    network = config.network
    choose_port(network, paths)
    text = f"{network.listen}:{network.port}" if network.port else "any free port"
    check_status_port(config.node)
    who = "the router is asked to forward it" if network.map_port else "forward it in the router"
    return f"{text}; for peers outside your network, {who}"


def reach_findings(paths: Paths) -> Iterator[Finding]:
    """Yields the verdict of peers on the node that runs here: can others reach it."""
    running = read_running(paths.running)
    if not names("reach"):
        yield Finding(
            "reach", "note", "without the extension reach, this node cannot find out who can reach it"
        )
        return
    if running is None:
        yield Finding("reach", "note", "once a node runs here, peers test whether they can reach it")
        return
    status = ask_status(running, paths)
    if isinstance(status, SwarmnodeError):
        yield Finding("reach", "note", status.message, status.hint)
        return
    reach = status.network.reach
    good = reach.verdict in ("reachable", "relayed")
    verdict: Verdict = "ok" if good and not status.exchange.starved else "note"
    text = "; ".join(filter(None, (reach.text, status.exchange.starved)))
    yield Finding("reach", verdict, text, "" if reach.verdict == "relayed" else "; or ".join(reach.steps))


def _clock() -> Finding:
    """Peers ignore headers whose time is far off, so a wrong clock makes a node unheard."""
    tool = shutil.which("timedatectl")
    if tool is None:
        return Finding("clock", "note", "unknown whether it is synchronized (no timedatectl)")
    command = [tool, "show", "--property=NTPSynchronized", "--value"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    if answer == "yes":
        return Finding("clock", "ok", "synchronized")
    if answer == "no":
        advice = "turn on time synchronization: timedatectl set-ntp true"
        return Finding("clock", "note", "not synchronized", advice)
    return Finding("clock", "note", "unknown")
