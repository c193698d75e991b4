"""What this machine is: cores, memory, accelerators. Nothing here imports torch before it is asked to.

[hardware] -> config (which preset), training (device), cli doctor
"""

import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

GIB = 2**30
NVIDIA_SMI_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. Memory in bytes; None where the driver does not tell."""

    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None


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
    return Machine(_cpu_name(), psutil.cpu_count() or 1, memory.total, memory.available, nvidia_gpus())


def nvidia_gpus() -> tuple[Gpu, ...]:
    """NVIDIA cards as the driver reports them; none when there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else ()


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Cards from `name, MiB, MiB` lines.

    >>> parse_nvidia_smi("NVIDIA GeForce RTX 4090, 24564, 24000")[0].name
    'NVIDIA GeForce RTX 4090'
    """
    gpus: list[Gpu] = []
    for line in text.strip().splitlines():
        name, total, free = (part.strip() for part in line.rsplit(",", 2))
        gpus.append(Gpu(name, _mebibytes(total), _mebibytes(free)))
    return tuple(gpus)


def usable_gpu(device: str) -> Gpu | None:
    """The card that torch would use for `policy.device`; None: no card, no CUDA build, not asked for."""
    name, _, index = device.partition(":")
    if name not in ("auto", "cuda") or not _torch_has_cuda():
        return None
    gpus = nvidia_gpus()
    number = int(index or 0)
    return gpus[number] if number < len(gpus) else None


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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown CPU")
