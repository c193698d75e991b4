"""`swarmnode config`: every setting, its value, and where that value came from."""

from typing import Annotated

import typer

from swarmnode.cli.settings import Assignments, ConfigFile, Home, Json, Preset, load_settings

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
    import msgspec
    from rich.console import Console
    from rich.table import Table

    settings = load_settings(home=home, preset=preset, config_file=config, assignments=set_)
    values = settings.config.model_dump()
    rows = [
        (key, values[key.partition(".")[0]][key.partition(".")[2]], origin)
        for key, origin in settings.origins.items()
    ]
    if json:
        typer.echo(
            msgspec.json.encode(
                {key: {"value": value, "origin": origin} for key, value, origin in rows}
            ).decode()
        )
        return
    table = Table(
        "setting", "value", "origin", *(["meaning"] if explain else []), box=None, header_style="bold"
    )
    for key, value, origin in rows:
        shown = (
            "unset"
            if value is None
            else ", ".join(map(str, value))
            if isinstance(value, tuple)
            else str(value)
        )
        table.add_row(key, shown, origin, *([_meaning(settings.config, key)] if explain else []))
    Console(soft_wrap=not explain).print(table)


def _meaning(config: object, key: str) -> str:
    section, _, name = key.partition(".")
    fields = type(config).model_fields[section].annotation.model_fields  # pyright: ignore
    return " ".join((fields[name].description or "").split())
