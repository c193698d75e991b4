"""Rewards that also depend on how long an answer became: DAPO's soft overlong punishment.

scored groups -> [shaping] -> advantage

It is applied where a group is trained on, to own and to external groups alike, with the limits of this node.
What a node shares are the rewards of the task: shaped ones could not be checked by drawing the task again.
"""

from collections.abc import Sequence

from swarmnode.config import TrainingConfig
from swarmnode.types import FinishReason


def shaped_rewards(
    rewards: Sequence[float | None],
    lengths: Sequence[int],
    finishes: Sequence[FinishReason],
    max_tokens: int,
    config: TrainingConfig,
) -> tuple[float | None, ...]:
    """The rewards less the overlong share of each answer.

    `lengths` are tokens of this node's tokenizer, `max_tokens` is its `rollout.max_tokens`; both count what
    an environment wrote in a conversation, as the limit cuts it all the same. None stays None.
    An aborted answer was not ended by the policy: its length says nothing, and its reward stays.

    >>> config = TrainingConfig(overlong_tokens=4)
    >>> shaped_rewards([1.0, 1.0, None], [6, 9, 10], ["stop", "stop", "length"], 10, config)
    (1.0, 0.25, None)
    """
    return tuple(
        reward
        if reward is None or finish == "abort"
        else reward - overlong_share(length, max_tokens, config.overlong_tokens)
        for reward, length, finish in zip(rewards, lengths, finishes, strict=True)
    )


def overlong_share(length: int, max_tokens: int, overlong_tokens: int) -> float:
    """0 up to `max_tokens - overlong_tokens`, from there in proportion up to 1 at `max_tokens` and beyond.

    The negative of R_length in DAPO (Yu et al. 2025, section 3.4, equation 13), with L_max = max_tokens and
    L_cache = overlong_tokens. An answer cut off by the limit has its length, so it loses everything. With
    `overlong_tokens` 0 nothing is overlong.

    >>> [overlong_share(length, 10, 4) for length in (6, 7, 10, 12)]
    [0.0, 0.25, 1.0, 1.0]
    """
    if overlong_tokens == 0:
        return 0.0
    # A zone longer than the limit would punish an answer without a token.
    zone = min(overlong_tokens, max_tokens)
    return min(1.0, max(0.0, (length - (max_tokens - zone)) / zone))
