"""How often an untrained policy is right, and what a person is told about it."""

from collections.abc import Sequence

import pytest

from swarmnode.extensions.workbench.first_answers import first_answers
from swarmnode.extensions.workbench.tryout import TriedAnswer, TriedExample


def tried(*rewards: float | None) -> TriedExample:
    answers = tuple(TriedAnswer("a", "stop", {"right": reward}, reward) for reward in rewards)
    return TriedExample("last", "last abcd=", {}, False, answers)


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        ([tried(0.0, 0.0), tried(0.0, 0.0)], "demonstrations"),
        ([tried(1.0, 0.0), tried(0.0, 0.0)], "50% of the examples teach"),
        ([tried(1.0, 1.0)], "harder examples"),
        ([tried(1.0, 1.0), tried(0.0, 0.0)], "tells them apart"),
    ],
)
def test_it_says_what_follows(examples: Sequence[TriedExample], said: str) -> None:
    assert said in first_answers(examples).follows


def test_right_demonstrations_are_a_beginning_where_no_answer_is_right() -> None:
    wrong = [tried(0.0, 0.0)]
    assert not first_answers(wrong).begins and first_answers([tried(1.0)]).begins
    shown = first_answers(wrong, demonstrated=3)
    assert shown.begins and "the demonstrations are learnt from first" in shown.follows


def test_pass_at_k_is_estimated_from_all_answers_and_unknown_rewards_do_not_count() -> None:
    found = first_answers([tried(1.0, 0.0, None), tried(0.0, 0.0)])
    assert (found.answers, found.paid) == (4, 0.25)
    assert found.pass_at == {1: 0.25, 2: 0.5}


def test_nothing_that_was_judged_is_no_error() -> None:
    assert first_answers([tried(None)]).pass_at == {}
