"""What this machine is: cores, memory, accelerators. Nothing here imports torch before it is asked to.

[hardware] -> config (which preset), training (device), cli doctor
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

GIB = 2**30
NVIDIA_SMI_TIMEOUT_S = 5.0
NVIDIA_SMI_COLUMNS = (
    "memory.total,memory.free,compute_cap,uuid,name",
    "memory.total,memory.free,index,uuid,name",
)
"""The name comes last, since it may hold a comma. Drivers before 510 refuse to tell a capability: a number of
the card stands in its place, which is no decimal."""
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
BF16_UNITS = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags of a CPU that multiplies bfloat16 two times (AVX-512) to sixteen times (AMX) as fast as float32."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. Memory in bytes; None where the driver does not tell."""

    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    capability: float | None = None
    """NVIDIA's compute capability, 8.9 for Ada; what a card can multiply follows from it."""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a model may use. Sizes in bytes."""

    cpu: str
    cores: int
    memory_total_bytes: int
    memory_free_bytes: int
    gpus: tuple[Gpu, ...]


def inspect_machine() -> Machine:
    """Look at this machine without loading torch (`nvidia-smi` answers for NVIDIA cards)."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if (container := container_memory()) is not None:
        total, free = min(total, container[0]), min(free, container[1])
    return Machine(_cpu_name(), psutil.cpu_count() or 1, total, free, nvidia_gpus())


def nvidia_gpus() -> tuple[Gpu, ...]:
    """NVIDIA cards as the driver reports them; none when there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    for columns in NVIDIA_SMI_COLUMNS:
        query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ()
        if done.returncode == 0:
            return parse_nvidia_smi(done.stdout)
    return ()


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Cards from `MiB, MiB, capability, uuid, name` lines.

    >>> parse_nvidia_smi("24564, 24000, 8.9, GPU-5a1e, NVIDIA GeForce RTX 4090")[0].name
    'NVIDIA GeForce RTX 4090'
    """
    gpus: list[Gpu] = []
    for line in text.strip().splitlines():
        total, free, capability, uuid, name = (part.strip() for part in line.split(",", 4))
        gpus.append(Gpu(name, _mebibytes(total), _mebibytes(free), _capability(capability), uuid))
    return tuple(gpus)


def usable_gpu(device: str) -> Gpu | None:
    """The card that torch would use for `policy.device`; None: no card, no CUDA build, not asked for."""
    name, _, index = device.partition(":")
    if name not in ("auto", "cuda") or not _torch_has_cuda():
        return None
    gpus = visible_gpus(nvidia_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    number = int(index or 0)
    return gpus[number] if number < len(gpus) else None


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves to a process, in its order (None: all).

    It lists numbers or beginnings of UUIDs, and what follows an entry that names no card does not count.

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


def _torch_has_cuda() -> bool:
    try:
        return "+cpu" not in version("torch")
    except PackageNotFoundError:
        return False


def free_disk_bytes(path: Path) -> int:
    """Free space where `path` is or will be created."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(existing).free


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def _capability(text: str) -> float | None:
    major, point, minor = text.partition(".")
    return float(text) if point and major.isdigit() and minor.isdigit() else None


def container_memory(cgroup: Path = CGROUP) -> tuple[int, int] | None:
    """Limit and free bytes of the container we are in (cgroup v2); None: no limit, or no such system.

    Pages of files are free in the sense that matters: the kernel drops them when somebody needs the room.
    """
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
    """Whether this CPU has units for products in bfloat16. False where the system does not tell."""
    return not BF16_UNITS.isdisjoint(cpu_flags(cpuinfo))


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """What this CPU can do, as Linux calls it (on ARM under another key); empty where it does not tell."""
    return frozenset((_cpuinfo("flags", cpuinfo) or _cpuinfo("Features", cpuinfo)).split())


def _cpu_name() -> str:
    return _cpuinfo("model name", CPUINFO) or "unknown CPU"


def _cpuinfo(key: str, cpuinfo: Path) -> str:
    """What Linux says of the first core; empty where it says nothing."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key)
    return next(values, "")
