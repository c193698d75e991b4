"""Rule `rescue`: a stranger's right answer takes the place of a failure of ours on the same example.

own groups without a right answer -> wait for somebody's success on the same example (gossip/helping.py asks
for it) -> [Rescue] -> Lessons: our failures with the advantages of the mixed group, and the success

    PYTHONPATH=examples swarmnode join --set exchange.rule=rules.rescue:Rescue

After PubSwap and SGT. A stranger's group says little about us: its mean would be our baseline, and one
success among 64 would be worth 7.9. So a failure of our own group is swapped for the success, and advantages
are those of the mixed group, at most those of a lone success of our own. No other foreign text is learned
from. Our failures end with our end of text, so the success does too: without, our end of text would be what
tells wrong from right (exchange/validation/body_check.py).
"""

from collections.abc import Mapping, Sequence

import msgspec

from swarmnode.training.losses import group_advantages, standardised
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.book import BookCandidate, Mend
from swarmnode.training.rules.book_rule import full_answers
from swarmnode.training.rules.lessons import GroupLesson, Lessons, Replay, Rule, SharingRule, pack, unpack
from swarmnode.training.rules.task_marks import Saved, TaskMarks
from swarmnode.types import ExampleKey, RolloutGroup

MAX_WAITING = 256
"""Own groups that wait for a success, the oldest out."""

MAX_AGE = 8
"""Policy versions that such a group may lie back."""


class RescueState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Groups that wait are not part of it: the next rounds bring new ones."""

    marks: Saved


class Rescue(Rule):
    """Keeps own groups without a right answer until a stranger has one."""

    keeps_own = True

    def __init__(self, settings: SharingRule, seed: int = 0, mend: Mend | None = None) -> None:
        super().__init__(settings, seed, mend)
        self.marks = TaskMarks()
        self._failed: dict[ExampleKey, RolloutGroup] = {}

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
    ) -> Lessons:
        self.marks.record(own, external)
        self._wait(own, version)
        rescued = {group.example.key: (group, answer) for group, answer in self._rescued(external)}
        mixed = [self._lesson(group, answer) for group, answer in rescued.values()]
        return Lessons(
            (
                *(GroupLesson(group) for group in own if group.example.key not in rescued),
                *(lesson for lesson, _ in mixed),
            ),
            external=(),
            replayed=tuple(success for _, success in mixed),
            shaped=self._settings.shaped,
            report=TrainReport(pass_rates=self.marks.pass_rates),
        )

    def state(self) -> bytes:
        return pack("rescue", RescueState(self.marks.by_task))

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> None:
        saved = unpack(data, "rescue", RescueState)
        if saved is None:
            return
        self.marks.by_task = dict(saved.marks)
        if tasks is not None:
            self.marks.keep_only(tasks)

    def _wait(self, own: Sequence[RolloutGroup], version: int) -> None:
        for group in own:
            if any(reward is not None for reward in group.rewards) and not self._passes(group):
                self._failed[group.example.key] = group
        young = [one for one in self._failed.items() if version - one[1].policy_version <= MAX_AGE]
        self._failed = dict(young[-MAX_WAITING:])

    def _passes(self, group: RolloutGroup) -> bool:
        task = group.example.key.task
        return any(self.marks.has_full(task, reward) for reward in group.rewards)

    def _rescued(self, external: Sequence[RolloutGroup]) -> list[tuple[RolloutGroup, BookCandidate]]:
        """Returns groups that waited, each with a success on its example, as it may be learned from."""
        wanted = [group for group in external if group.example.key in self._failed]
        found = [answer for group in wanted for answer in full_answers(group, self.marks, own=False)[:1]]
        answers = {one.example.key: one for one in (self._mend(found) if self._mend and found else found)}
        return [(self._failed.pop(key), answer) for key, answer in answers.items() if answer.entry.token_ids]

    def _lesson(self, group: RolloutGroup, answer: BookCandidate) -> tuple[GroupLesson, Replay]:
        """Returns what our failures teach but the worst, and what the success in its place does."""
        rewards = list(group.rewards)
        worst = min((reward, place) for place, reward in enumerate(rewards) if reward is not None)[1]
        rewards[worst] = answer.entry.reward
        credit = group_advantages(rewards, standardised) or [None] * len(rewards)
        advantage, credit[worst] = credit[worst] or 0.0, None
        success = Replay(answer.entry, advantage, ends=self._settings.teach_ends)
        return GroupLesson(group, tuple(credit)), success
