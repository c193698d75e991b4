"""Rules `book` and `own_book`: keep verified right answers, and replay them where we fail.

own groups (all of a round), J external groups -> [BookRule] -> Lessons: the own groups, and M of the book

We do not train on a foreign group with its sender's advantages: a stranger's failures would be negatives on
text that we would hardly write, and its mean reward would set our baseline. What it got right is a lesson,
and stays one. Every answer that our own judge gave full marks (task_marks.py) goes into the book, ours
included. A replayed answer has a constant advantage and no behaviour probability, and is part of the own
groups' optimizer step, under its normaliser.

A stranger's answer is trained with our end of text behind it. We do not believe strangers about where an
answer ended (exchange/validation/body_check.py): right answers marked "length" beside wrong ones marked
"stop" made EOS the difference between them, and unlearnt it. That attack needs wrong answers and a claim.
Here there are no wrong answers and we ask for no claim: the judge gave full marks to the text as it stands,
so stopping there is right, no matter who wrote it. As in supervised learning, every position before the end
teaches the policy not to stop. An attacker can still choose right answers that are short. That teaches
brevity where our judge accepts it, by the text as much as by its end; `teach_ends` turns the end off.

Before a foreign answer enters the book it is mended (mender.py), and its author has to agree with what we
found ourselves (teachers.py).
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from swarmnode.chat import written_prompt
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.book import Book, BookCandidate, Entries, Entry, Mend
from swarmnode.training.rules.demonstrated import Demonstrated, still_needed
from swarmnode.training.rules.lessons import Lessons, Replay, Rule, SharingRule, as_they_are, pack, unpack
from swarmnode.training.rules.task_marks import Saved, TaskMarks
from swarmnode.training.rules.teachers import Compare, SavedTeachers, Teachers
from swarmnode.types import Completion, ExampleKey, RolloutGroup


class BookState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    marks: Saved
    entries: Entries
    teachers: SavedTeachers = ()
    """Missing from states saved before authors were measured."""


class BookRule(Rule):
    """Replays answers that our own judge gave full marks, from any author."""

    keeps_own = True
    keeps_answers = True

    def __init__(self, settings: SharingRule, seed: int = 0, mend: Mend | None = None) -> None:
        super().__init__(settings, seed, mend)
        self.marks = TaskMarks()
        self.book = Book(settings.book_size, settings.answers_per_example)
        self._demonstrated = Demonstrated()
        self.teachers: Teachers | None = None
        """Decides who may teach us. None: everybody may."""

    def measure_by(self, compare: Compare) -> None:
        self.teachers = Teachers(compare)

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
    ) -> Lessons:
        foreign = external if self.fetches else ()
        self.marks.record(own, (*foreign, *self._demonstrated.waiting))
        mended, refused = self._enter(own, foreign, version)
        self.book.keep_only(lambda entry: self.marks.has_full(entry.task, entry.reward))
        pass_rates = self.marks.pass_rates
        rng = random.Random(f"{self._seed}:{version}:book")
        settings = self._settings
        count, foreign = settings.book_replayed, settings.book_foreign
        if self.replayed is not None:
            count, foreign = self.replayed, None
        drawn = self.book.draw(count, pass_rates, rng, foreign=foreign)
        drawn = still_needed(drawn, pass_rates, rng)
        return Lessons(
            own=as_they_are(own),
            external=(),
            replayed=tuple(self._replay(entry) for entry in drawn),
            replay_steps=max(1, len(drawn) // (self.step_answers or settings.step_answers)),
            shaped=settings.shaped,
            report=TrainReport(
                book=len(self.book),
                book_foreign=self.book.foreign,
                mended=mended,
                refused=refused,
                pass_rates=pass_rates,
                teaching=0 if self.teachers is None else self.teachers.teaching,
                waiting=0 if self.teachers is None else self.teachers.waiting,
                doubted=() if self.teachers is None else self.teachers.doubted,
            ),
        )

    def demonstrate(self, groups: Sequence[RolloutGroup]) -> bool:
        self._demonstrated.add(groups)
        return True

    def state(self) -> bytes:
        teachers = () if self.teachers is None else self.teachers.saved()
        return pack(self._settings.name, BookState(self.marks.by_task, self.book.entries, teachers))

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> int:
        saved = unpack(data, self._settings.name, BookState)
        if saved is None:
            return 0
        self.marks.by_task = dict(saved.marks)
        if tasks is not None:
            self.marks.keep_only(tasks)
        kept = [one for one in saved.entries if tasks is None or tasks.get(one.task) == one.version]
        for entry in kept:
            self.book.add(entry)
        if self.teachers is not None:
            self.teachers.restore(saved.teachers, tasks)
        return len(saved.entries) - len(kept)

    def origins(self) -> Mapping[tuple[str, ExampleKey], int]:
        return Counter((entry.author, entry.example) for entry in self.book.entries)

    def forget_strangers(self, tasks: Collection[str]) -> None:
        self.book.keep_only(lambda entry: entry.own or entry.task not in tasks)
        if self.teachers is not None:
            self.teachers.forget(lambda entry: entry.task not in tasks)

    def _enter(
        self, own: Sequence[RolloutGroup], foreign: Sequence[RolloutGroup], version: int
    ) -> tuple[int, int]:
        """Returns how many foreign answers were cut on their way in, and how many were refused."""
        ours = (*own, *self._demonstrated.take_known(self.marks))
        found = [answer for group in ours for answer in full_answers(group, self.marks, own=True)]
        given = [answer for group in foreign for answer in full_answers(group, self.marks, own=False)]
        kept = self._mend(given) if self._mend is not None else given
        self._add(found)
        self._add_foreign(kept, version)
        as_given = {(answer.example.key, answer.entry.token_ids) for answer in given}
        mended = sum((answer.example.key, answer.entry.token_ids) not in as_given for answer in kept)
        return mended, len(given) - len(kept)

    def _add_foreign(self, given: Sequence[BookCandidate], version: int) -> None:
        """Adds the foreign answers whose authors may teach us, and removes those of authors that no longer
        may."""
        if self.teachers is None:
            self._add(given)
            return
        entries = [one.entry for one in given if one.entry not in self.book]
        finds = [entry for entry in self.book.entries if entry.own]
        rng = random.Random(f"{self._seed}:{version}:teachers")
        ruling = self.teachers.rule_on(entries, finds, rng)
        for entry in ruling.enter:
            self.book.add(entry)
        if ruling.leave:
            left = [entry for entry in self.book.entries if not entry.own and entry.author in ruling.leave]
            self.book.keep_only(lambda entry: entry.own or entry.author not in ruling.leave)
            self.teachers.take_back(left)

    def _add(self, answers: Sequence[BookCandidate]) -> None:
        for answer in answers:
            self.book.add(answer.entry)

    def _replay(self, entry: Entry) -> Replay:
        return Replay(entry, self._settings.book_weight, entry.ended or self._settings.teach_ends)


class OwnBook(BookRule):
    """Replays only answers that we found ourselves."""

    fetches = False
    keeps_answers = False


def full_answers(group: RolloutGroup, marks: TaskMarks, *, own: bool) -> list[BookCandidate]:
    """Returns the distinct answers of a group that our own judge gave full marks."""
    key, prompt = group.example.key, written_prompt(group.example.prompt)
    found: dict[tuple[int, ...], BookCandidate] = {}
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        if completion.finish == "abort" or reward is None or not marks.has_full(key.task, reward):
            continue
        ended = completion.finish == "stop"
        token_ids = _without_end(completion)
        if token_ids and completion.sampled_tokens:
            entry = Entry(
                key.task, key.version, key.seed, key.index, prompt, token_ids, reward, group.author, own,
                ended, completion.given, in_turns=not isinstance(completion.said, str),
            )  # fmt: skip
            found.setdefault(token_ids, BookCandidate(group.example, completion.text, entry))
    return list(found.values())


def _without_end(completion: Completion) -> tuple[int, ...]:
    """Returns the token ids without the end of text, which is the last token of a completion that stopped."""
    return completion.token_ids[:-1] if completion.finish == "stop" else completion.token_ids
