"""Right answers of conversations in the book and in its file."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from swarmnode.chat import Prompt, Turn, prompt_of
from swarmnode.errors import CheckpointError
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.packing import TrainingSample
from swarmnode.training.round import SampleRules, lesson_samples, replayed_samples
from swarmnode.training.rules.book import BookCandidate, Entry
from swarmnode.training.rules.book_rule import BookRule
from swarmnode.training.rules.lessons import GroupLesson, SharingRule
from swarmnode.training.rules.mending.mender import Mender
from swarmnode.training.rules.mending.mending import Reading, ReadingRequest
from swarmnode.types import RolloutGroup, Stretch
from tests.answered import EOS, answered, foreign, own
from tests.two_tools import Letters, TwoTools

IDS = [6, EOS, 20, 21, 7]
GIVEN = ((2, 4),)
"""Tokens 20 and 21 are the environment's."""
RULES = SampleRules(lambda prompt: (3, 4), TrainingConfig(), 64, end=lambda: EOS)


def heard(group: RolloutGroup, place: int = 0, given: tuple[Stretch, ...] = GIVEN) -> RolloutGroup:
    """The group with an environment's tokens in one of its answers."""
    completions = list(group.completions)
    completions[place] = replace(completions[place], given=given)
    return replace(group, completions=tuple(completions))


def conversations(*, author: str) -> RolloutGroup:
    finish = "stop" if author == "me" else "length"
    return heard(answered([(IDS, 1.0), ([9, 9, 9, 9, 9], 0.0)], author=author, finish=finish, index=5))


def replays(rule: BookRule) -> list[TrainingSample]:
    return list(replayed_samples(rule.lessons([], [], version=9).replayed, RULES))


@pytest.mark.parametrize("author", ["me", "stranger"])
def test_a_replayed_conversation_teaches_what_was_said_and_not_what_was_heard(author: str) -> None:
    group, rule = conversations(author=author), BookRule(SharingRule())
    rule.lessons([group] if author == "me" else [], [] if author == "me" else [group], version=1)
    restarted = BookRule(SharingRule())
    restarted.restore(rule.state())
    for one in (rule, restarted):
        (sample,) = replays(one)
        assert (sample.completion_ids, sample.given) == ((*IDS, EOS), GIVEN)
        assert [sample.completion_ids[place] for place in sample.learned] == [6, EOS, 7, EOS]


def test_a_conversation_that_had_no_room_behind_its_last_turn_gets_no_second_end() -> None:
    rule = BookRule(SharingRule())
    full = heard(answered([([*IDS, EOS], 1.0), ([9], 0.0)], finish="length"))
    rule.lessons([full], [], version=1)
    assert [sample.completion_ids for sample in replays(rule)] == [(*IDS, EOS)]


def test_a_prompt_of_messages_is_the_same_when_a_book_was_kept_and_read_again() -> None:
    talk = prompt_of([{"role": "system", "content": "brief"}, {"role": "user", "content": "?"}], [{"a": 1}])
    group = answered([([3], 1.0), ([2], 0.0)])
    rule, restarted = BookRule(SharingRule()), BookRule(SharingRule())
    rule.lessons([replace(group, example=replace(group.example, prompt=talk))], [], version=1)
    restarted.restore(rule.state())
    asked: list[Prompt] = []
    rules = replace(RULES, render=lambda prompt: (asked.append(prompt), (3, 4))[1])
    list(replayed_samples(restarted.lessons([], [], version=9).replayed, rules))
    assert asked == [talk]


def changed_entry(state: bytes, fields: Sequence[object]) -> bytes:
    """A saved book whose entries end with these fields, as given tokens stand there."""
    packed = msgspec.msgpack.decode(state)
    marks, entries, *_ = packed[2]
    packed[2] = [marks, [[*entry[:10], *fields] for entry in entries]]
    return msgspec.msgpack.encode(packed)


def test_books_of_before_there_were_environments_are_read_and_damaged_ones_are_not() -> None:
    rule, old = BookRule(SharingRule()), BookRule(SharingRule())
    rule.lessons([own(([3, 4], 1.0), ([2], 0.0))], [], version=1)
    old.restore(changed_entry(rule.state(), []))
    assert old.book.entries == rule.book.entries and len(old.book.entries) == 1
    with pytest.raises(CheckpointError):
        old.restore(changed_entry(rule.state(), [[[1, 9]]]))


def unread(requests: Sequence[ReadingRequest]) -> list[Reading]:
    raise AssertionError("nothing of a conversation is looked at")


def test_nothing_is_cut_out_of_a_conversation() -> None:
    task = TwoTools()
    example = next(task.examples(0))
    ids = tuple(map(ord, "buy more")), tuple(map(ord, "?3"))
    buying = Entry(task.name, "1", 0, 0, "?", (*ids[0], *ids[1]), 1.0, "x", False, False, ((8, 9),), True)
    saying = Entry(task.name, "1", 0, 0, "?", (51,), 1.0, "x", False, False, in_turns=True)
    heard_once, said_only = BookCandidate(example, "buy more3", buying), BookCandidate(example, "3", saying)
    mender = Mender(unread, {task.name: task}, Letters())
    assert mender([heard_once, said_only]) == [heard_once, said_only]
    assert task.played == []


def test_what_a_stranger_never_said_is_no_sample() -> None:
    """An answer of nothing but what our environment says, and the end of a turn that nobody sampled."""
    silent = heard(foreign(([EOS, 20, 21], 1.0), ([9], 0.0)), given=((0, 3),))
    rule = BookRule(SharingRule(teach_ends=False))
    rule.lessons([], [silent], version=1)
    assert replays(rule) == []


def test_what_strangers_say_to_an_environment_counts_by_how_likely_it_is_to_us() -> None:
    """A right answer that asks nothing is known to those who saw what our environment says."""
    blind = answered([([9], 1.0), ([8, 9], 0.0)], author="stranger", finish="length")
    talks = tuple(replace(one, said=(Turn("9"),)) for one in blind.completions)
    group = replace(blind, completions=talks)
    assert [sample.shaped for sample in lesson_samples(GroupLesson(group), RULES) or ()] == [True, True]
    assert not any(sample.shaped for sample in lesson_samples(GroupLesson(blind), RULES) or ())
    own_group = replace(group, author="me")
    for one, shaped in ((group, True), (own_group, False)):
        rule = BookRule(SharingRule())
        rule.lessons([one] if one is own_group else [], [] if one is own_group else [one], version=1)
        restarted = BookRule(SharingRule())
        restarted.restore(rule.state())
        assert [sample.shaped for sample in replays(restarted)] == [shaped]
