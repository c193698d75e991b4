"""Rule `hacpo`: external groups against a baseline and with a weight that know who is how capable.

own and external groups -> [Hacpo] -> Lessons

    PYTHONPATH=examples swarmnode join --set exchange.rule=rules.hacpo:Hacpo

HACPO (arXiv 2603.02604): agents of different strength answer; k learns from all of them. With P the mean
reward of an agent's last rounds, w_kj = P_k / P_j, and R_ji the reward of answer i of agent j to one example:

    mu_k = mean over all answers of  w_kj R_ji          what k would get for an example that j gets R for
    A_ji = (R_ji - mu_k) / sigma                        times w_jk = P_j / P_k where j is not k

Here P is what our own judge gave the groups that reached us, for others as for ourselves, so nobody can claim
to be capable. But whoever chooses what to send chooses its P: each weight is at most 1, so the best that
comes of it is to count as much as we do, with the baseline that the group itself has. Where a P is not
positive, or not known, the weight is 1. The paper's other weight compares mean log-probabilities under both
policies; the author's do not travel, so it is 1.

Own groups on examples that nobody else answered keep the advantages of `training.loss`.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.training.losses import EPSILON
from swarmnode.training.rules.book import Mend
from swarmnode.training.rules.lessons import GroupLesson, Lessons, Rule, SharingRule, pack, unpack
from swarmnode.types import MIN_REWARD_SPREAD, ExampleKey, RolloutGroup, spread_of

ROUNDS = 5
"""So many of an origin's last rounds make its P."""

MAX_ORIGINS = 256
"""Authors whose P is known: those heard of last."""

OURSELVES = ""
"""Our own name among the origins. No author has it."""


class HacpoState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    recent: Annotated[
        tuple[tuple[str, Annotated[tuple[float, ...], Meta(max_length=ROUNDS)]], ...],
        Meta(max_length=MAX_ORIGINS + 1),
    ]


class Hacpo(Rule):
    """Remembers how origins did lately."""

    def __init__(self, settings: SharingRule, seed: int = 0, mend: Mend | None = None) -> None:
        super().__init__(settings, seed, mend)
        self._recent: OrderedDict[str, deque[float]] = OrderedDict()

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
    ) -> Lessons:
        self._remember(own, external)
        together: dict[ExampleKey, list[tuple[str, RolloutGroup]]] = {}
        for origin, group in [*((OURSELVES, one) for one in own), *((one.author, one) for one in external)]:
            together.setdefault(group.example.key, []).append((origin, group))

        def lesson(origin: str, group: RolloutGroup) -> GroupLesson:
            mates = together[group.example.key]
            if all(other == OURSELVES for other, _ in mates):
                return GroupLesson(group)
            return GroupLesson(group, self._advantages(origin, group, mates))

        return Lessons(
            tuple(lesson(OURSELVES, group) for group in own),
            tuple(lesson(group.author, group) for group in external),
            shaped=self._settings.shaped,
        )

    def capability(self, origin: str) -> float | None:
        """P: the mean reward of an origin's last rounds. None: not known."""
        recent = self._recent.get(origin)
        return fmean(recent) if recent else None

    def state(self) -> bytes:
        recent = tuple((origin, tuple(means)) for origin, means in self._recent.items())
        return pack("hacpo", HacpoState(recent))

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> None:
        saved = unpack(data, "hacpo", HacpoState)
        if saved is not None:
            self._recent = OrderedDict((name, deque(means, ROUNDS)) for name, means in saved.recent)

    def _remember(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> None:
        means: dict[str, list[float]] = {}
        for origin, group in [*((OURSELVES, one) for one in own), *((one.author, one) for one in external)]:
            if (mean := group.reward_mean) is not None:
                means.setdefault(origin, []).append(mean)
        for origin, of_round in means.items():
            self._recent.setdefault(origin, deque(maxlen=ROUNDS)).append(fmean(of_round))
            self._recent.move_to_end(origin)
        # We are in every round, so it is never us who was not heard of for longest.
        while len(self._recent) > MAX_ORIGINS:
            self._recent.popitem(last=False)

    def _advantages(
        self, origin: str, group: RolloutGroup, mates: Sequence[tuple[str, RolloutGroup]]
    ) -> tuple[float | None, ...] | None:
        rewards = [(who, reward) for who, one in mates for reward in one.rewards if reward is not None]
        values = [reward for _, reward in rewards]
        if len(values) < 2 or (spread := spread_of(values)) < MIN_REWARD_SPREAD:
            return None
        ours = self.capability(OURSELVES)
        baseline = fmean(weight(ours, self.capability(who)) * reward for who, reward in rewards)
        counts = 1.0 if origin == OURSELVES else weight(self.capability(origin), ours)
        return tuple(
            None if reward is None else counts * (reward - baseline) / (spread + EPSILON)
            for reward in group.rewards
        )


def weight(capability: float | None, of: float | None) -> float:
    """How much of the capability `of` is `capability`, at most all of it.

    >>> weight(0.2, 0.8), weight(0.8, 0.2), weight(None, 0.5), weight(0.5, -1.0)
    (0.25, 1.0, 1.0, 1.0)
    """
    if capability is None or of is None or capability <= 0 or of <= 0:
        return 1.0
    return min(1.0, capability / of)
