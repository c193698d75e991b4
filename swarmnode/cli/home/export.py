"""`swarmnode export`: take what was learnt elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import (
    Assignments,
    Best,
    ConfigFile,
    Home,
    Model,
    Policy,
    Preset,
    RunName,
    of_policy,
)
from swarmnode.node.commands.offline import export_offline
from swarmnode.settings.config_layers import load_settings


def export(
    folder: Annotated[Path, typer.Argument(help="Where to write; must not exist yet.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model with the adapter merged in.")
    ] = False,
    best: Best = False,
    model: Model = None,
    run: RunName = None,
    policy: Policy = 0,
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
) -> None:
    """Write the adapter of the newest (or best) checkpoint as a PEFT folder, or the merged model."""
    settings = load_settings(
        home=home,
        preset=preset,
        config_file=config,
        assignments=set_,
        flags={"policy.model": model, "node.run": run},
    )
    settings = of_policy(settings, policy)
    what = export_offline(settings.config, settings.model, settings.paths, folder, merged=merged, best=best)
    tell(json, {"wrote": what, "folder": str(folder)}, [f"wrote {what} to {folder}"])
