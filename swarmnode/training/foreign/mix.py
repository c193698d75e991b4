"""Which groups of a round are trained on.

rollout (own groups), exchange (J external groups) -> [own_to_learn_from] -> trainer
"""

import random
from collections.abc import Sequence

from swarmnode.config import Config
from swarmnode.training.foreign.sharing import keeps_own
from swarmnode.types import RolloutGroup


def own_to_learn_from(
    groups: Sequence[RolloutGroup], external: int, config: Config, rng: random.Random
) -> Sequence[RolloutGroup]:
    """Chooses which of a round's own groups to hand to the rule, beside so many external ones.

    All of them where the rule keeps them, those without a gradient too: it counts them. Else I, and as many
    more as external ones are missing. Without an exchange, as many as there are.
    """
    if keeps_own(config):
        return groups
    exchange = config.exchange
    wanted = exchange.local_groups + exchange.external_groups
    room = max(0, wanted - external) if exchange.enabled else config.rollout.groups
    return choose_own(groups, room, rng)


def choose_own(groups: Sequence[RolloutGroup], room: int, rng: random.Random) -> list[RolloutGroup]:
    """Chooses at most `room` own groups, uniformly among those that have a gradient.

    SAPO's rule for external groups (section 5: drop zero advantage, then sample uniformly), applied to our
    own as well: a group without a gradient would only take the place of one that has it. What peers did not
    send is room for own groups, so a node alone trains on as much as one in a swarm.
    """
    useful = [group for group in groups if group.has_gradient]
    return useful if len(useful) <= room else rng.sample(useful, room)
