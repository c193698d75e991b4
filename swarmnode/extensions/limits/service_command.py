"""`swarmnode service install`: has the system start a node at boot, with the settings given.

command line -> [install] -> service_texts.py -> a unit of the user's systemd
                          -> docker/swarmnode.service, to copy
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from swarmnode.cli.join import join, settings_given
from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import invited
from swarmnode.errors import ConfigError, StorageError, SwarmnodeError
from swarmnode.extensions.limits.service_texts import user_unit
from swarmnode.machine.storage import builtin_folder, replace_file
from swarmnode.settings.config_layers import ENV_PREFIX

app = typer.Typer(help="Install a service that starts a node at boot.", no_args_is_help=True)

SYSTEMCTL_TIMEOUT_S = 30.0

LINGER = "`loginctl enable-linger` keeps it running while nobody is logged in"


@app.callback()
def service() -> None:
    """Install a service that starts a node at boot."""


@app.command()
def install(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="After --: the arguments for `join`."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option("--for", metavar="SYSTEM", help="user (systemd) or system (systemd)."),
    ] = "user",
    print_: Annotated[bool, typer.Option("--print", help="Print the unit file and change nothing.")] = False,
    json: Json = False,
) -> None:
    """Start a node now and whenever this machine boots.

    \b
    swarmnode service install -- --hours 22-7 --max-disk 20
    swarmnode service install --for system --print
    """
    if kind not in ("user", "system"):
        raise ConfigError(f"--for {kind}: no such system", hint="choose user or system")
    text = _packaged(arguments) if kind == "system" else _unit_with(arguments or ())
    if print_:
        tell(json, {"for": kind, "text": text}, [text.rstrip("\n")])
        return
    if kind != "user":
        raise ConfigError(f"--for {kind} is installed by hand", hint=f"print it with `--for {kind} --print`")
    unit = Path.home() / ".config" / "systemd" / "user" / "swarmnode.service"
    try:
        before = _command_in(unit.read_text(errors="replace")) if unit.exists() else ""
        replace_file(unit, text.encode(), mode=0o600)  # An invitation in it may hold the key of a swarm.
    except OSError as error:
        raise StorageError(f"cannot write {unit}: {error.strerror}", hint="see --print") from error
    for command in (("daemon-reload",), ("enable", "swarmnode"), ("restart", "swarmnode")):
        _systemctl(*command)
    lines = [f"{unit} is written, and the node is running: `systemctl --user status swarmnode`", LINGER]
    if before and before != _command_in(text):
        lines.append(f"it replaces the service that ran {before}")
    tell(json, {"for": kind, "text": text, "path": str(unit)}, lines)


def _unit_with(arguments: Sequence[str]) -> str:
    """Returns the unit of a node with these arguments of `join`. Raises ConfigError, and what else is said
    of settings that are none: a service that cannot start helps nobody."""
    given = _read(arguments)
    # The unit passes an invitation on, and each start reads it.
    swarm, addresses = invited(given["home"], given["swarm"], given["addresses"], keeps=False)
    settings = settings_given({**given, "swarm": swarm, "addresses": addresses})
    if lost := [origin for origin in settings.origins.values() if origin.startswith(ENV_PREFIX)]:
        raise ConfigError(
            f"the service would not have {', '.join(lost)} of this shell",
            hint=f"put what they say into {settings.paths.user_config}, or unset them",
        )
    on_card = settings.config.policy.device != "cpu" and shutil.which("nvidia-smi") is not None
    # Of a member it bounds the stage alone, beside which the process takes what it takes.
    whole = not on_card and not settings.config.pipeline.name
    memory_gb = settings.config.limits.memory_gb if whole else None
    home = settings.paths.home if given["home"] is None else None
    named = () if home is None else ("--home", str(home))
    command = (sys.executable, "-m", "swarmnode", "join", *arguments, *named)
    return user_unit(command, os.getcwd(), memory_gb)


def _command_in(unit: str) -> str:
    return unit.partition("ExecStart=")[2].partition("\n")[0]


def _packaged(arguments: Sequence[str] | None) -> str:
    if arguments:
        raise ConfigError("a system-wide unit takes its settings from the environment", hint="see --print")
    return (builtin_folder("docker") / "swarmnode.service").read_text()


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns what `join` would make of these arguments. Raises click's UsageError."""
    holder = typer.Typer(rich_markup_mode=None)
    holder.command()(join)
    return get_command(holder).make_context("join", list(arguments)).params


def _systemctl(*command: str) -> None:
    program, words = shutil.which("systemctl"), " ".join(command)
    if program is None:
        raise SwarmnodeError(
            "there is no systemctl here", hint="copy the output of --print to the folder of units"
        )
    try:
        done = subprocess.run(
            (program, "--user", *command),
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SwarmnodeError(f"systemctl --user {words} does not answer: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise SwarmnodeError(
            f"systemctl --user {words}: {said[0]}", hint="the unit is written; show it with --print"
        )
