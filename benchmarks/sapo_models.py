"""The policies that swarms start from, built once into the folder where nodes keep theirs.

[models_of] -> model/tiny.py, model/specialists.py -> one folder per node -> sapo_run.py
"""

from dataclasses import replace
from pathlib import Path

from sapo_plan import Swarm
from sapo_worlds import tasks_of

from swarmnode.model.specialists import OWN_TASKS, build_specialists, build_strangers
from swarmnode.model.tiny import RECIPE, build_tiny
from swarmnode.storage import resolve_paths

WIDE = replace(RECIPE, hidden=96, intermediate=240, heads=3)
"""Twice the parameters of the tiny policy: every other node of `sizes`."""

FOLDER = resolve_paths().models


def models_of(swarm: Swarm) -> list[Path]:
    """The folders of its nodes, in order; what is missing is built now."""
    match swarm.models:
        case "specialists":
            # Under a lax judge the answers are the same, and so are the policies that were taught them.
            taught = tasks_of("step" if swarm.world == "step" else "builtin")
            distinct = len(taught) // OWN_TASKS
            kinds = build_specialists(FOLDER, min(swarm.nodes, distinct), tasks=tuple(taught.values()))
            return [kinds[node % distinct] for node in range(swarm.nodes)]
        case "strangers":
            return build_strangers(FOLDER, swarm.nodes)
        case "sizes":
            kinds = [build_tiny(FOLDER), build_tiny(FOLDER, recipe=WIDE)]
            return [kinds[node % 2] for node in range(swarm.nodes)]
        case _:
            return [build_tiny(FOLDER)] * swarm.nodes
