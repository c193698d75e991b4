"""The resources of this machine: cores, memory, accelerators. torch is imported only where needed."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from swarmnode.machine.installing import how_to_install

GIB = 2**30
NVIDIA_SMI_TIMEOUT_S = 5.0
NVIDIA_SMI_MOST_CHARS = 1 << 16
NVIDIA_SMI_PLAIN = ("--format=csv,noheader,nounits",)
NVIDIA_SMI_COLUMNS = (
    "memory.total,memory.free,compute_cap,uuid,driver_version,name",
    "memory.total,memory.free,index,uuid,driver_version,name",
)
"""Columns of nvidia-smi. The name comes last, since it may contain a comma. Drivers before 510 do not report
the capability: the card's index, which is not a decimal, takes its place."""
LEAST_DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Oldest Linux driver for builds of each major version of CUDA."""
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
BF16_UNITS = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags of CPUs that multiply bfloat16 two times (AVX-512) to sixteen times (AMX) as fast as float32."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. Memory is in bytes; None: the driver does not report it."""

    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    capability: float | None = None
    """NVIDIA's compute capability, such as 8.9 for Ada. It decides which types the card can multiply."""
    uuid: str = ""
    driver: str = ""
    """Version of NVIDIA's driver, such as 580.65.06. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class TorchCuda:
    """The installed torch's report on CUDA on this machine."""

    version: str
    built_for: str | None
    """Version of CUDA that it is built for. None: a build without CUDA."""
    uuids: tuple[str, ...] | None = None
    """UUIDs of the usable cards, in CUDA's order, which is not the driver's. None: CUDA does not start."""
    complaint: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """The card that a node will use, or the reason why an existing one is not used."""

    gpu: Gpu | None
    problem: str = ""
    """The reason. Empty: a card is used, none is here, or none was requested."""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that a model may use. Sizes are in bytes."""

    cpu: str
    cores: int
    memory_total_bytes: int
    memory_free_bytes: int
    gpus: tuple[Gpu, ...]


def inspect_machine() -> Machine:
    """Inspects this machine without loading torch (`nvidia-smi` answers for NVIDIA cards)."""
    return Machine(_cpu_name(), psutil.cpu_count() or 1, *memory_bytes(), nvidia_gpus())


def torch_threads() -> int:
    """Returns the number of torch threads on a CPU: OMP_NUM_THREADS if it is set, else one. More pay off only
    for large models on an idle machine."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(said)) if said.isdecimal() else 1


def memory_bytes() -> tuple[int, int]:
    """Returns the total and the free memory of this machine, or of the container that we run in."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if (container := container_memory()) is not None:
        total, free = min(total, container[0]), min(free, container[1])
    return total, free


def nvidia_gpus() -> tuple[Gpu, ...]:
    """Returns the NVIDIA cards that the driver reports; none without a driver."""
    for columns in NVIDIA_SMI_COLUMNS:
        if printed := ask_nvidia_smi((f"--query-gpu={columns}", *NVIDIA_SMI_PLAIN)):
            return parse_nvidia_smi(printed)
    return ()


def ask_nvidia_smi(arguments: Sequence[str]) -> str:
    """Returns the output of nvidia-smi, or "" if it is missing, refuses, or takes too long."""
    try:
        done = subprocess.run(
            ("nvidia-smi", *arguments),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:NVIDIA_SMI_MOST_CHARS] if done.returncode == 0 else ""


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Returns cards from `MiB, MiB, capability, uuid, driver, name` lines.

    >>> parse_nvidia_smi("24564, 24000, 8.9, GPU-5a1e, 580.65.06, NVIDIA GeForce RTX 4090")[0].name
    'NVIDIA GeForce RTX 4090'
    """
    gpus: list[Gpu] = []
    for line in text.strip().splitlines():
        total, free, capability, uuid, driver, name = (part.strip() for part in line.split(",", 5))
        gpus.append(Gpu(name, _mebibytes(total), _mebibytes(free), _capability(capability), uuid, driver))
    return tuple(gpus)


def card_in_use(device: str) -> str:
    """Returns the name by which nvidia-smi finds the card of `policy.device`. Empty: there is none."""
    gpu = find_card(device).gpu
    return "" if gpu is None else gpu.uuid or "0"


def find_card(device: str) -> Card:
    """Returns the card that torch will use for `policy.device`, or the reason why it cannot. Imports torch if
    the driver shows a card and the installed torch is not the build for CPUs."""
    name, _, index = device.partition(":")
    gpus = nvidia_gpus() if name in ("auto", "cuda") else ()
    if not gpus:
        return Card(None)
    return card_for(int(index or 0), gpus, torch_cuda(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def card_for(number: int, gpus: tuple[Gpu, ...], torch: TorchCuda | None, visible: str | None) -> Card:
    """Returns CUDA's card `number`, from the driver's and torch's reports.

    >>> old = Gpu("RTX 4090", 24 * GIB, 23 * GIB, driver="470.82.01")
    >>> card_for(0, (old,), TorchCuda("2.13.0", "13.0"), None).problem
    'RTX 4090 is not used: its driver 470.82.01 is too old for torch 2.13.0, which is built for CUDA 13.0'
    """
    allowed = visible_gpus(gpus, visible)
    if not allowed and torch is not None and not torch.uuids:
        return Card(None)  # CUDA_VISIBLE_DEVICES hides all cards, which surprises nobody.
    first = (allowed or gpus)[0]
    if torch is None or torch.uuids is None:
        return _idle_card(first, torch)
    if number >= len(torch.uuids):
        return Card(None, f"no card {number}: torch sees {len(torch.uuids)}", "see `nvidia-smi -L`")
    by_uuid = [gpu for gpu in gpus if gpu.uuid and _same_uuid(gpu.uuid, torch.uuids[number])]
    # A part of a card (MIG) has its own number, which the driver's list does not show.
    found = by_uuid or list(allowed[number : number + 1])
    return Card(found[0] if found else None)


def _same_uuid(one: str, other: str) -> bool:
    return one.removeprefix("GPU-").lower() == other.removeprefix("GPU-").lower()


def _idle_card(gpu: Gpu, torch: TorchCuda | None) -> Card:
    """Returns the reason why torch does not use a card that the driver shows, with advice."""
    if torch is None:
        return Card(None, f"{gpu.name} is not used: torch is not installed", how_to_install("train"))
    if torch.built_for is None:
        return Card(
            None,
            f"{gpu.name} is not used: torch {torch.version} is a build without CUDA",
            "install a CUDA build of torch, or pass --set policy.device=cpu",
        )
    least = LEAST_DRIVERS.get(int(torch.built_for.partition(".")[0]), "")
    if least and gpu.driver and _major(gpu.driver) < _major(least):
        return Card(
            None,
            f"{gpu.name} is not used: its driver {gpu.driver} is too old for torch {torch.version},"
            f" which is built for CUDA {torch.built_for}",
            f"update the NVIDIA driver to {least} or newer, or install a torch built for an older CUDA",
        )
    why = f": {torch.complaint}" if torch.complaint else ""
    return Card(
        None,
        f"{gpu.name} is not used: torch {torch.version}, built for CUDA {torch.built_for}, cannot start CUDA"
        f" with driver {gpu.driver or 'of unknown version'}{why}",
        "see the output of `python -c 'import torch; torch.cuda.init()'`",
    )


def _major(version: str) -> int:
    digits = version.partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


@cache
def torch_cuda() -> TorchCuda | None:
    """Returns torch's report on CUDA, made once per process. None: torch is not installed."""
    try:
        number = version("torch")
    except PackageNotFoundError:
        return None
    if "+cpu" in number:
        return TorchCuda(number, None)
    import torch

    cuda: Any = torch.cuda
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        works = cuda.is_available()
    complaint = (str(said[-1].message).strip().splitlines() or [""])[0] if said else ""
    if not works:
        return TorchCuda(number, torch.version.cuda, None, complaint)
    uuids = tuple(str(cuda.get_device_properties(index).uuid) for index in range(cuda.device_count()))
    return TorchCuda(number, torch.version.cuda, uuids)


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Returns the cards that CUDA_VISIBLE_DEVICES leaves to a process, in its order (None: all).

    It lists numbers or prefixes of UUIDs; entries after one that matches no card do not count.

    >>> one, two = Gpu("A", None, None, uuid="GPU-a1"), Gpu("B", None, None, uuid="GPU-b2")
    >>> [gpu.name for gpu in visible_gpus((one, two), "GPU-b,0,-1,1")]
    ['B', 'A']
    """
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (each.strip() for each in visible.split(",")):
        by_number = gpus[int(entry) : int(entry) + 1] if entry.isdecimal() else ()
        by_uuid = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        found = by_number or by_uuid[:1]
        if not found:
            break
        chosen += found
    return tuple(chosen)


def free_disk_bytes(path: Path) -> int:
    """Returns the free bytes on the disk of `path`, which need not exist yet."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(existing).free


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def _capability(text: str) -> float | None:
    major, point, minor = text.partition(".")
    return float(text) if point and major.isdigit() and minor.isdigit() else None


def container_memory(cgroup: Path = CGROUP) -> tuple[int, int] | None:
    """Returns the limit and the free bytes of the container that we run in (cgroup v2). None: there is no
    limit, or no cgroup. Pages of files count as free: the kernel drops them when memory is needed."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return int(limit), max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def cpu_has_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Returns True if this CPU has units for products in bfloat16; False also if the system does not say."""
    return not BF16_UNITS.isdisjoint(cpu_flags(cpuinfo))


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Returns the feature flags of this CPU, by Linux's names (on ARM under another key). Empty: unknown."""
    return frozenset((_cpuinfo("flags", cpuinfo) or _cpuinfo("Features", cpuinfo)).split())


def _cpu_name() -> str:
    return _cpuinfo("model name", CPUINFO) or "unknown CPU"


def _cpuinfo(key: str, cpuinfo: Path) -> str:
    """Returns the value of a key for the first core in Linux's cpuinfo, or "" if it is missing."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key)
    return next(values, "")
