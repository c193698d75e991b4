"""Command-line options become settings and folders here; every command goes through it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from swarmnode.config_layers import Settings

Home = Annotated[
    Path | None, typer.Option("--home", help="Keep identity, checkpoints, logs and cache under this folder.")
]
Preset = Annotated[str | None, typer.Option("--preset", help="Settings by name from configs/, such as tiny.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; may be repeated.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="auto, tiny, a folder, or a hub name of a causal LM.")
]
TaskSpecs = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        help="Built-in task, `builtin` for all, a Python file, package.module:attribute or a data set; may be"
        " repeated.",
    ),
]
Policy = Annotated[
    int,
    typer.Option(
        "--policy",
        min=0,
        max=15,
        help="Which policy, where this home has several (0: the first, or the only).",
    ),
]
Base = Annotated[bool, typer.Option("--base", help="The base model, without the trained adapter.")]
Best = Annotated[
    bool, typer.Option("--best", help="The checkpoint with the best evaluation instead of the newest.")
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Take the likeliest token instead of sampling.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def load_settings(
    *,
    home: Path | None = None,
    preset: str | None = None,
    config_file: Path | None = None,
    assignments: Sequence[str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> "Settings":
    """All layers of settings (config_layers.py), which no command loads before it is called."""
    from swarmnode.config_layers import load_settings

    return load_settings(
        home=home, preset=preset, config_file=config_file, assignments=assignments, flags=flags
    )


def of_policy(settings: "Settings", number: int) -> "Settings":
    """What a command works with that is about one of several policies. Raises ConfigError for one that never
    ran here."""
    from swarmnode.errors import ConfigError
    from swarmnode.node.policies import config_of

    paths = settings.paths.policy(number)
    if number and paths not in settings.paths.policies():
        raise ConfigError(
            f"there is no policy {number} in {settings.paths.data}",
            hint=f"it has {len(settings.paths.policies())} of them, counted from 0; see --policy and --home",
        )
    return replace(settings, config=config_of(settings.config, number), paths=paths)
