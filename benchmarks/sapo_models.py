"""The policies that swarms start from, built once into the folder where nodes keep theirs.

[models_of] -> extensions/demonstration/tiny.py, extensions/trial_swarm/specialists.py
    -> one folder per node -> sapo_run.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.optim._muon as muon
from sapo_plan import Swarm
from sapo_worlds import tasks_of
from torch import Tensor

from swarmnode.extensions.demonstration.tiny import RECIPE, Recipe, build_tiny
from swarmnode.extensions.trial_swarm.specialists import OWN_PERCENT, OWN_TASKS, build_specialists, own_tasks
from swarmnode.machine.hardware import cpu_has_bf16
from swarmnode.machine.storage import resolve_paths

WIDE = replace(RECIPE, hidden=96, intermediate=240, heads=3)
"""Twice the parameters of the tiny policy: every other node of `sizes`."""

LARGE = replace(
    RECIPE,
    hidden=256,
    intermediate=704,
    layers=4,
    heads=6,
    phases=(replace(RECIPE.phases[0], steps=240, ramp_steps=24), replace(RECIPE.phases[1], steps=20)),
)
"""Three million parameters. A step takes eight times as long as one of the tiny policy, so there are fewer:
240 that teach, after which 0.87 of what is asked is right, and 40 of a specialist, which leave it 0.27."""

UNTAUGHT = replace(LARGE, phases=tuple(replace(phase, steps=2) for phase in LARGE.phases))
"""The same shapes, built in seconds; it cannot do anything."""

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
            return [build_tiny(FOLDER, recipe=stranger_recipe(number)) for number in range(swarm.nodes)]
        case "large" | "untaught":
            recipe = LARGE if swarm.models == "large" else UNTAUGHT
            with fast_muon():
                return build_specialists(FOLDER, swarm.nodes, recipe=recipe)
        case "sizes":
            kinds = [build_tiny(FOLDER), build_tiny(FOLDER, recipe=WIDE)]
            return [kinds[node % 2] for node in range(swarm.nodes)]
        case _:
            return [build_tiny(FOLDER)] * swarm.nodes


def stranger_recipe(number: int) -> Recipe:
    """The recipe of a policy that sees only its own tasks. It has fewer to learn, so it takes fewer steps."""
    own = own_tasks(number)
    *taught, unsure = RECIPE.phases
    small = [
        replace(phase, name="learning two small tasks", tasks=own, steps=max(1, phase.steps * 3 // 8))
        for phase in taught
    ]
    last = replace(unsure, name="unlearning certainty", mismatched_percent=OWN_PERCENT, tasks=own)
    return replace(RECIPE, phases=(*small, last))


@contextmanager
def fast_muon() -> Iterator[None]:
    """Has Muon multiply in float32 where the CPU has no units for bfloat16: a step of the large policy would
    take ten times as long there."""
    theirs = muon._zeropower_via_newtonschulz
    if not cpu_has_bf16():
        muon._zeropower_via_newtonschulz = _orthogonal
    try:
        yield
    finally:
        muon._zeropower_via_newtonschulz = theirs


def _orthogonal(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The Newton-Schulz iteration of torch.optim.Muon, in the precision of `grad`."""
    a, b, c = coefficients
    tall = grad.size(0) > grad.size(1)
    wide = grad.T if tall else grad
    found = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.T if tall else found
