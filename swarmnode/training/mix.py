"""Which groups of a round are trained on.

rollout (own groups), exchange (J external groups) -> [choose_own] -> trainer
"""

import random
from collections.abc import Sequence

from swarmnode.types import RolloutGroup


def choose_own(groups: Sequence[RolloutGroup], room: int, rng: random.Random) -> list[RolloutGroup]:
    """At most `room` own groups, uniformly among those that have a gradient.

    SAPO's rule for external groups (section 5: drop zero advantage, then sample uniformly), applied to our
    own as well: a group without a gradient would only take the place of one that has it. What peers did not
    send is room for own groups, so a node alone trains on as much as one in a swarm.
    """
    useful = [group for group in groups if group.has_gradient]
    return useful if len(useful) <= room else rng.sample(useful, room)
