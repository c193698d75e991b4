"""`swarmnode export`: take what was learnt elsewhere."""

from pathlib import Path
from tempfile import TemporaryDirectory
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
    settings_of_trained,
)
from swarmnode.errors import ConfigError
from swarmnode.extensions.results.exported import export_offline
from swarmnode.extensions.results.hub import pusher


def export(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to write; must not exist yet. Not needed with --push.")
    ] = None,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged",
            help="Write the whole model, adapter merged; llama.cpp's convert_hf_to_gguf.py makes it GGUF.",
        ),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Push it to this repository on the hub, with a model card, using the token in HF_TOKEN.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a repository that --push creates public.")
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
    """Write the adapter of the newest (or best) checkpoint as a PEFT folder, or the merged model; or push it
    to a hub, where `swarmnode pull` fetches it to go on."""
    if folder is None and to is None:
        raise ConfigError("nowhere to write", hint="name a folder, or --push OWNER/NAME")
    push = None if to is None else pusher(to, public=public)
    settings = settings_of_trained(
        home=home, preset=preset, config=config, set_=set_, model=model, run=run, policy=policy
    )
    with TemporaryDirectory() as aside:
        place = folder or Path(aside) / "export"
        done = export_offline(settings, place, merged=merged, best=best)
        found = {"wrote": done.what, "folder": None if folder is None else str(folder), "pushed": None}
        told = [] if folder is None else [f"wrote {done.what} to {folder}"]
        if push is not None:
            pushed = push(done)
            seen = "only you can read it" if pushed.private else "everybody can read it"
            found |= {"pushed": pushed}
            told.append(f"pushed {done.what} to {pushed.url}; {seen}")
    tell(json, found, told)
