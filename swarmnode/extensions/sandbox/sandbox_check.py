"""The finding of `swarmnode doctor` on the sandbox.

diagnosis.py -> registry.py -> [sandbox_findings] -> sandbox.py
"""

from collections.abc import Iterator

from swarmnode.extensions.doctor.diagnosis import Finding
from swarmnode.extensions.sandbox.isolation import Isolation
from swarmnode.extensions.sandbox.sandbox import available
from swarmnode.machine.hardware import Machine
from swarmnode.settings.config import Config


def sandbox_findings(config: Config, machine: Machine) -> Iterator[Finding]:
    """Yields what is found of a sandbox on this machine."""
    yield sandbox_finding(available(), config.tasks.sandbox == "optional")


def sandbox_finding(isolation: Isolation, optional: bool) -> Finding:
    """Returns the finding for this isolation. Only rewards that run programs in answers need one."""
    text = isolation.describe()
    if isolation.confines:
        return Finding("sandbox", "ok", text)
    if optional:
        return Finding("sandbox", "note", f"{text}, as tasks.sandbox=optional allows")
    advice = "for rewards that run code, enable landlock (Linux 5.13) or user namespaces"
    return Finding("sandbox", "note", f"{text}, so none are run", advice)
