"""`swarmnode config show`: every setting, its value, and where that value came from."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

import typer

from swarmnode.cli.output import Json, tell
from swarmnode.cli.settings import Assignments, ConfigFile, Home, Preset, settings_here
from swarmnode.node.building.assemble import check_network
from swarmnode.node.building.policies import check_policies, config_of
from swarmnode.settings.config import explain_setting

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
    """Print each setting with its value and its origin, as `join` would use them.

    Settings that it would refuse are refused here in the same words.
    """
    settings = settings_here(home=home, preset=preset, config=config, set_=set_, flags={})
    check_policies(settings.config)
    for number in range(settings.config.node.policies):
        check_network(config_of(settings.config, number).network)
    tree = settings.config.model_dump()
    values = {key: tree[key.partition(".")[0]][key.partition(".")[2]] for key in settings.origins}
    found = {key: {"value": values[key], "origin": origin} for key, origin in settings.origins.items()}
    tell(json, found, _lines(values, settings.origins, explain=explain))


def _lines(values: Mapping[str, Any], origins: Mapping[str, str], *, explain: bool) -> Iterator[str]:
    widest = max(map(len, origins))
    for key, origin in origins.items():
        line = f"{key:{widest}}  {_shown(values[key]):12}  {origin}"
        # One line a setting, however long: what is cut cannot be searched for.
        yield f"{line:{widest + 24}}  {explain_setting(key)}" if explain else line


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ", ".join(map(str, cast(tuple[object, ...], value))) if isinstance(value, tuple) else str(value)
