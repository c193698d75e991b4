"""The finding of `swarmnode doctor` on the C compiler.

diagnosis.py -> registry.py -> [compiler_findings] -> compiler.py
"""

from collections.abc import Iterator

from swarmnode.extensions.doctor.diagnosis import Finding
from swarmnode.extensions.native.compiler import find_compiler
from swarmnode.machine.hardware import Machine
from swarmnode.settings.config import Config


def compiler_findings(config: Config, machine: Machine) -> Iterator[Finding]:
    """Yields what is found of a compiler where training runs on the CPU; a card needs none."""
    if config.policy.device not in ("auto", "cpu") or (config.policy.device == "auto" and machine.gpus):
        return
    if config.policy.cpu_kernels == "off":
        yield Finding("C compiler", "note", "not asked: policy.cpu_kernels is off")
    elif (found := find_compiler()) is not None:
        yield Finding("C compiler", "ok", f"{found} compiles the CPU kernels, once")
    else:
        text = "none found: torch's operations take the place of our CPU kernels"
        yield Finding(
            "C compiler", "note", text, "install gcc or clang: training on this CPU is slower without"
        )
