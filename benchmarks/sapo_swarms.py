"""The swarms of sapo.py, by name.

[SWARMS] -> sapo_models.py (what nodes start from), sapo_run.py (who does a round when)
"""

from sapo_plan import Swarm

from swarmnode.testing.attackers import ATTACKS

SMALL = {"rollout.groups": 16}
"""A round of 16 groups of 8: half of the preset, so that a hundred rounds fit."""

TINY = {"rollout.groups": 8}
"""Of eight nodes, one example of each task."""

SWARMS: dict[str, Swarm] = {
    # All were taught all tasks; then each was made unsure of all but two.
    "specialists": Swarm("specialists", rounds=100, settings=SMALL),
    # One start for all, in the preset as shipped.
    "equals": Swarm("equals"),
    # Each was only ever taught two tasks: of the others nothing is latent.
    "strangers": Swarm("strangers", rounds=60, settings=SMALL),
    "speeds": Swarm("equals", rounds=64, every=(1, 2, 4, 8), settings=SMALL),
    "sizes": Swarm("sizes", settings=SMALL),
    # The last one begins when the others have done thirty rounds.
    "fresh": Swarm("equals", rounds=70, joins=(0, 0, 0, 30), settings=SMALL),
    # Specialists of three million parameters (three_million.py).
    "three_million": Swarm("large", rounds=36, settings=TINY),
    "untaught": Swarm("untaught", nodes=2, rounds=1, settings=TINY),
    "processes": Swarm("specialists", rounds=100, settings=SMALL, processes=True),
    # Eight specialists; then the last three of them are attackers (sapo_poison.py).
    "peaceful": Swarm("specialists", nodes=8, rounds=60, world="step", settings=TINY),
    "poison": Swarm("specialists", nodes=8, rounds=60, world="step", attackers=3, settings=TINY),
    "peaceful_lax": Swarm("specialists", nodes=8, rounds=60, world="lax", settings=TINY),
    "poison_lax": Swarm("specialists", nodes=8, rounds=60, world="lax", attackers=3, settings=TINY),
}

WORLDS = ("step", "lax")
"""Where liars.py has its attackers: with steps that matter, and under a judge that takes anything."""

SWARMS |= {
    f"five_{world}": Swarm("specialists", nodes=5, rounds=60, world=world, settings=TINY) for world in WORLDS
}
SWARMS |= {
    f"{attack}_{world}": Swarm(
        "specialists", nodes=8, rounds=60, world=world, attackers=3, attack=attack, settings=TINY
    )
    for world in WORLDS
    for attack in ATTACKS
}

GRID = (1e-3, 2e-3, 3e-3, 4e-3)
"""Learning rates that a rule is tried with, at seed 0; the best cumulative reward wins."""

CLAIMED: dict[str, tuple[str, ...]] = {
    "specialists": ("alone", "alone_successes", "filter", "own_book", "sapo", "successes", "book"),
    "equals": ("alone", "own_book", "sapo", "book"),
    "poison": ("alone", "sapo", "book"),
    "peaceful": ("book",),
    "strangers": ("alone", "book"),
    "speeds": ("alone", "book"),
    "sizes": ("alone", "book"),
    "fresh": ("book",),
}
"""The rules that a whole run compares in each swarm."""

FIXED = {"processes": 2e-3, "peaceful": 2e-3, "poison": 2e-3, "peaceful_lax": 2e-3, "poison_lax": 2e-3}
"""One learning rate for all rules: what is compared there is one rule with and without attackers."""

AS_SHIPPED = frozenset({("equals", "book"), ("fresh", "book")})
"""These have the learning rate of the preset and no other."""


def rates_of(swarm: str, rule: str) -> tuple[float | None, ...]:
    """Learning rates to try; None stands for that of the preset."""
    if swarm in FIXED:
        return (FIXED[swarm],)
    return (None,) if (swarm, rule) in AS_SHIPPED else GRID
