"""Turns command-line options into settings and folders; every command goes through this module."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.errors import ConfigError, NetworkError
from swarmnode.machine.storage import resolve_paths
from swarmnode.network.admission import accept
from swarmnode.network.finding.invitation import is_invitation, read_invitation
from swarmnode.node.building.policies import config_of
from swarmnode.settings.config_layers import Settings, load_settings
from swarmnode.training.checkpoints.run_folders import with_trained_model

Home = Annotated[
    Path | None, typer.Option("--home", help="Keep identity, checkpoints, logs and cache under this folder.")
]
Preset = Annotated[str | None, typer.Option("--preset", help="Named settings from configs/, such as tiny.")]
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
RunName = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="A run of this home; see `swarmnode runs`."),
]
Policy = Annotated[
    int,
    typer.Option(
        "--policy",
        min=0,
        max=15,
        help="The policy, if this home has several (0: the first, or the only one).",
    ),
]
Base = Annotated[bool, typer.Option("--base", help="The base model, without the trained adapter.")]
Best = Annotated[
    bool, typer.Option("--best", help="The checkpoint with the best evaluation instead of the newest.")
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Take the likeliest token instead of sampling.")]

TASK_ENDINGS = (".py", ".jsonl", ".json", ".csv", ".parquet")
"""Endings of the files that --task takes; no address has any of them."""


def invited(
    home: Path | None, swarm: str | None, addresses: Sequence[str] | None, *, keeps: bool = True
) -> tuple[str | None, list[str] | None]:
    """Returns the swarm and the addresses to dial, including those of an invitation. The key of a private
    swarm is stored in the home if `keeps`. Raises NetworkError."""
    texts = addresses or ()
    if task := next((text for text in texts if text.partition("?")[0].endswith(TASK_ENDINGS)), None):
        raise ConfigError(f"{task} is not a peer address", hint=f"did you mean --task {task}?")
    dialled: list[str] = []
    for text in texts:
        if not is_invitation(text):
            dialled.append(text)
            continue
        invitation = read_invitation(text)
        if swarm not in (None, invitation.name):
            raise NetworkError(
                f"the invitation is to {invitation.name}, not to {swarm}", hint="leave out --swarm"
            )
        swarm = invitation.name
        dialled += invitation.seeds
        if invitation.key and keeps:
            accept(invitation, resolve_paths(home))
    return swarm, dialled or None


def settings_of_trained(
    *,
    home: Path | None,
    preset: str | None,
    config: Path | None,
    set_: list[str] | None,
    model: str | None,
    run: str | None,
    policy: int,
    named: Mapping[str, Any] | None = None,
) -> Settings:
    """Returns the settings of a command about what one policy has learnt here. `named`: settings from its
    other options. Raises ConfigError for a policy that never ran here."""
    flags = {"policy.model": model, "node.run": run, **(named or {})}
    found = settings_here(home=home, preset=preset, config=config, set_=set_, flags=flags, policy=policy)
    return of_policy(found, policy)


def settings_here(
    *,
    home: Path | None,
    preset: str | None,
    config: Path | None,
    set_: list[str] | None,
    flags: Mapping[str, Any],
    policy: int = 0,
) -> Settings:
    """Returns the settings of a command line, with its other options as `flags`. Without a named model, it is
    the one that this policy was trained with in this home."""

    def loaded(trained: str | None) -> Settings:
        given = flags if trained is None else {**flags, "policy.model": trained}
        found = load_settings(home=home, preset=preset, config_file=config, assignments=set_, flags=given)
        said = {} if trained is None else {"policy.model": "trained in this home earlier"}
        return replace(found, origins={**found.origins, **said})

    return with_trained_model(loaded, policy)


def of_policy(settings: Settings, number: int) -> Settings:
    """Returns the settings of one of several policies. Raises ConfigError for one that never ran here."""
    paths = settings.paths.policy(number)
    if number and paths not in settings.paths.policies():
        raise ConfigError(
            f"there is no policy {number} in {settings.paths.data}",
            hint=f"it has {len(settings.paths.policies())} of them, counted from 0; see --policy and --home",
        )
    return replace(settings, config=config_of(settings.config, number), paths=paths)
