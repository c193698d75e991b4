"""Command-line options become settings and folders here; every command goes through it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.paths import Paths, builtin_folder, resolve_paths

if TYPE_CHECKING:
    from swarmnode.config import Config

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
    typer.Option("--task", help="Built-in task, `builtin` for all, or a Python file; may be repeated."),
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a command works with. `model` is resolved: tiny, a folder or a hub name."""

    config: "Config"
    origins: Mapping[str, str]
    paths: Paths
    model: str
    model_reason: str


def load_settings(
    *,
    home: Path | None = None,
    preset: str | None = None,
    config_file: Path | None = None,
    assignments: Sequence[str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge all layers. The tiny policy brings its preset along unless another one was named."""
    from swarmnode.config_layers import LoadedConfig, load_config
    from swarmnode.models import resolve_model

    paths = resolve_paths(home)
    given = {key: value for key, value in (flags or {}).items() if value is not None}

    def load(preset_file: Path | None) -> LoadedConfig:
        return load_config(
            preset=preset_file,
            user_file=paths.user_config,
            config_file=config_file,
            assignments=assignments or (),
            flags=given,
        )

    loaded = load(_preset_file(preset) if preset else None)
    model, reason = resolve_model(
        loaded.config, builtin_folder("configs") / "models.toml", paths.model_choice
    )
    if model == "tiny" and preset is None:
        loaded = load(_preset_file("tiny"))
    return Settings(loaded.config, loaded.origins, paths, model, reason)


def of_policy(settings: Settings, number: int) -> Settings:
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


def _preset_file(name: str) -> Path:
    from swarmnode.config_layers import presets
    from swarmnode.errors import ConfigError

    known = presets(builtin_folder("configs"))
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}", hint=f"known presets: {', '.join(known)}")
    return known[name]
