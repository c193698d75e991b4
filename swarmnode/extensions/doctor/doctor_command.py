"""`swarmnode doctor`: is this machine fit to join, and if not, what to do first."""

from collections.abc import Iterator, Sequence

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Assignments, ConfigFile, Home, Preset, settings_here
from swarmnode.extensions.doctor.diagnosis import Finding, examine


def doctor(
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Check machine, memory, disk, ports, clock and versions. Exits with 1 when a node could not run."""
    findings = examine(settings_here(home=home, preset=preset, config=config, set_=set_, flags={}))
    tell(json, findings, _lines(findings))
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(1)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.verdict:8} {finding.subject:11} {finding.text}"
    steps = [finding.advice for finding in findings if finding.advice]
    for number, step in enumerate(steps, 1):
        yield ("\nNext steps\n" if number == 1 else "") + f"  {number}. {step}"
    if not steps:
        yield "\nNothing to do: run `swarmnode join`."
