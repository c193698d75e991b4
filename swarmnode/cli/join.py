"""`swarmnode join`: start this machine's node and run it until it is done or told to stop."""

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

import typer

from swarmnode.cli.settings import (
    Assignments,
    ConfigFile,
    Home,
    Model,
    Preset,
    RunName,
    TaskSpecs,
    invited,
    settings_here,
)
from swarmnode.node.showing.ending import Ending
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.registry import find
from swarmnode.settings.config_layers import Settings

OPTIONS = {
    "swarm": "swarm.name",
    "port": "network.port",
    "model": "policy.model",
    "engine": "rollout.engine",
    "policies": "node.policies",
    "pipeline": "pipeline.name",
    "hours": "limits.hours",
    "power": "limits.power",
    "max_memory": "limits.memory_gb",
    "max_disk": "limits.disk_gb",
    "max_upload": "exchange.upload_mb_per_s",
    "max_download": "exchange.download_mb_per_s",
    "rounds": "node.rounds",
    "run": "node.run",
    "seed": "node.seed",
}
"""Options of `join` that each set one setting; `settings_given` reads them."""


def settings_given(given: Mapping[str, Any]) -> Settings:
    """Returns the settings of a `join` command line. `given`: its parameters by name; None: not given. Raises
    ConfigError."""
    overlap = given["overlap"]
    flags = {
        "network.seeds": tuple(given["addresses"] or ()) or None,
        "rollout.overlap": None if overlap is None else "on" if overlap else "off",
        "tasks.names": tuple(given["task"] or ()) or None,
        **{key: given[name] for name, key in OPTIONS.items()},
    }
    files = {name: given[name] for name in ("home", "preset", "config", "set_")}
    return settings_here(**files, flags=flags)


def join(
    context: typer.Context,
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="An invitation, or peers to dial, as printed by their `join`. None: a new swarm.",
        ),
    ] = None,
    swarm: Annotated[str | None, typer.Option("--swarm", help="Name of the swarm.")] = None,
    model: Model = None,
    task: TaskSpecs = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Stop after this many rounds of the run in all.")
    ] = None,
    run: RunName = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of draws, sampling and adapter.")] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", help="Rollout engine: auto, embedded, vllm or your own."),
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option("--overlap/--no-overlap", help="Generate the next round while training on this one."),
    ] = None,
    policies: Annotated[
        int | None, typer.Option("--policies", help="Policies to train at the same time on one base model.")
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            "--pipeline",
            metavar="NAME",
            help="Train a part of a larger model, with others.",
        ),
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="TCP port to listen on.")] = None,
    hours: Annotated[
        str | None, typer.Option("--hours", help="Hours of the day in which rounds may start, such as 22-7.")
    ] = None,
    power: Annotated[
        str | None,
        typer.Option("--power", metavar="SHARE", help="Share of the time to work, such as 60%."),
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option("--max-memory", metavar="GIB", help="Memory limit for model and training.")
    ] = None,
    max_disk: Annotated[
        float | None, typer.Option("--max-disk", metavar="GIB", help="Disk limit for the home.")
    ] = None,
    max_upload: Annotated[
        float | None, typer.Option("--max-upload", metavar="MB", help="Upload limit in megabytes per second.")
    ] = None,
    max_download: Annotated[
        float | None,
        typer.Option("--max-download", metavar="MB", help="Download limit in megabytes per second."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start the run over; earlier checkpoints are moved aside.")
    ] = False,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> None:
    """Join a swarm, or start one: ask, answer, share, listen, learn.

    \b
    swarmnode join                                     a new swarm, on the built-in tasks
    swarmnode join --task last.py --rounds 100         on your own task
    swarmnode join /ip4/192.168.1.20/tcp/4001/p2p/ID   the swarm of the node with this address

    The last line printed is JSON with rounds, tokens, seconds, reward_first and reward_last; with several
    policies, a list of these and their totals.
    """
    with STOP_SIGNALS:
        swarm, addresses = invited(home, swarm, addresses)
        settings = settings_given({**context.params, "swarm": swarm, "addresses": addresses})
        run_it = find("run", "pipeline" if settings.config.pipeline.name else "alone")
        leave(run_it(settings, fresh=fresh))


def leave(ending: Ending) -> NoReturn:
    """Prints the last line and ends the process. Everything is on disk by now: taking torch apart module by
    module takes seconds, and Python would wait without end for a thread that some library left behind."""
    print(ending.line)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  as multiprocessing does before it leaves
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending.exit_code)
