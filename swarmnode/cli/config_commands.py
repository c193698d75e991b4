"""`swarmnode config`: every setting, its value, and where that value came from."""

import sys
import textwrap
from typing import Annotated, Any, cast

import msgspec
import typer

from swarmnode.cli.settings import Assignments, ConfigFile, Home, Json, Preset
from swarmnode.settings.config import explain_setting
from swarmnode.settings.config_layers import load_settings
from swarmnode.settings.settings_page import reference_page

app = typer.Typer(help="Show settings and where they come from.", no_args_is_help=True)


@app.command()
def show(
    home: Home = None,
    preset: Preset = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json: Json = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add the sentence that explains each setting.")
    ] = False,
) -> None:
    """Print each setting with its value and its origin, as `join` would use them."""
    settings = load_settings(home=home, preset=preset, config_file=config, assignments=set_)
    tree = settings.config.model_dump()
    values = {key: tree[key.partition(".")[0]][key.partition(".")[2]] for key in settings.origins}
    if json:
        found = {key: {"value": values[key], "origin": origin} for key, origin in settings.origins.items()}
        typer.echo(msgspec.json.encode(found, enc_hook=str).decode())
        return
    widest = max(map(len, settings.origins))
    for key, origin in settings.origins.items():
        line = f"{key:{widest}}  {_shown(values[key]):12}  {origin}"
        if not explain:
            typer.echo(line)
        elif sys.stdout.isatty():
            meaning = textwrap.indent(textwrap.fill(explain_setting(key), 76), "    ")
            typer.echo(f"{line.rstrip()}\n{meaning}")
        else:
            # One line a setting, however long: what is cut cannot be searched for.
            typer.echo(f"{line:{widest + 24}}  {explain_setting(key)}")


@app.command()
def reference() -> None:
    """Print the page with every setting, its default and what it may be (docs/settings.md)."""
    typer.echo(reference_page(), nl=False)


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ", ".join(map(str, cast(tuple[object, ...], value))) if isinstance(value, tuple) else str(value)
