"""`swarmnode config`: every setting, its value, and where that value came from."""

from typing import Annotated, Any, cast

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
    from rich.markup import escape
    from rich.table import Table

    from swarmnode.config import explain_setting

    settings = load_settings(home=home, preset=preset, config_file=config, assignments=set_)
    tree = settings.config.model_dump()
    values = {key: tree[key.partition(".")[0]][key.partition(".")[2]] for key in settings.origins}
    if json:
        found = {key: {"value": values[key], "origin": origin} for key, origin in settings.origins.items()}
        typer.echo(msgspec.json.encode(found).decode())
        return
    columns = ["setting", "value", "origin", *(["meaning"] if explain else [])]
    table = Table(*columns, box=None, header_style="bold")
    for key, origin in settings.origins.items():
        meaning = [explain_setting(key)] if explain else []
        table.add_row(*(escape(cell) for cell in (key, _shown(values[key]), origin, *meaning)))
    Console(soft_wrap=not explain).print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ", ".join(map(str, cast(tuple[object, ...], value))) if isinstance(value, tuple) else str(value)
