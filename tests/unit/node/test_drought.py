"""When a person is told that there is nothing to learn from, and when not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarmnode.node.drought import ROUNDS, Droughts, advice_on
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, Span


def group(rewards: Sequence[float | None], task: str = "last") -> RolloutGroup:
    said = tuple(Completion("a", (97,), (-1.0,), (Span(0, 0, 1),), "stop") for _ in rewards)
    scores = tuple({"reward": reward} for reward in rewards)
    return RolloutGroup(Example(ExampleKey(task, "1", 0, 0), "?"), said, scores, "me", 0)


def droughts_of(*groups: RolloutGroup, rounds: int = ROUNDS) -> Droughts:
    droughts = Droughts()
    for _ in range(rounds):
        droughts.add_round(groups)
    return droughts


def test_it_is_said_after_twenty_rounds_without_a_right_answer_and_not_before() -> None:
    wrong = group([0.0] * 8), group([0.0] * 8)
    assert droughts_of(*wrong, rounds=ROUNDS - 1).advice_by_task() == {}
    (said,) = droughts_of(*wrong).advice_by_task().values()
    assert said.startswith("no answer to last was right in 20 rounds (320 answers): nothing to learn")
    for helps in ("a swarm", "demonstrations", "pays for part of an answer", "easier examples"):
        assert helps in said


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([group([1.0] * 4)], "had the reward 1.00"),
        ([group([1.0] * 4), group([0.0] * 4)], "always had equal rewards"),
        ([group([-1.0] * 4)], "was right"),
    ],
    ids=["all right", "known or not", "all punished"],
)
def test_it_says_which_of_the_ways_there_are_to_teach_nothing(
    groups: list[RolloutGroup], expected: str
) -> None:
    assert expected in droughts_of(*groups).advice_by_task()["last"]


def test_it_says_so_where_an_example_always_had_the_same_answer() -> None:
    same, differing = group([1.0] * 4), group([1.0] * 4)
    other = replace(differing.completions[0], token_ids=(98,))
    differing = replace(differing, completions=(other, *differing.completions[1:]))
    advised = "another engine: all answers to an example were the same"
    assert advised in droughts_of(same, group([0.0] * 4)).advice_by_task()["last"]
    assert advised not in droughts_of(same, differing).advice_by_task()["last"]


def test_one_group_with_a_gradient_ends_it() -> None:
    droughts = droughts_of(group([0.0] * 4))
    droughts.add_round([])
    assert droughts.by_task.keys() == {"last"}, "a round without the task says nothing of it"
    droughts.add_round([group([0.0] * 4), group([0.0, 0.0, 0.0, 0.1])])
    assert droughts.by_task == {}


def test_a_task_is_judged_by_its_own_answers() -> None:
    droughts = droughts_of(group([0.0] * 4), group([0.0, 1.0], "rev"), group([None, None], "lost"))
    assert droughts.advice_by_task().keys() == {"last", "lost"}, "rev teaches"


def test_a_reward_that_is_always_none_is_told_and_asks_nobody_for_help() -> None:
    assert "in 2 rounds" in droughts_of(group([None, None]), rounds=2).advice_by_task()["last"]
    droughts = droughts_of(group([None, None]))
    assert droughts.advice_by_task()["last"].startswith("no answer to last had a reward in 20 rounds")
    assert droughts.never_right() == set()
    # As soon as answers have rewards these say what is missing.
    droughts.add_round([group([-1.0] * 4)])
    assert "no answer to last was right" in droughts.advice_by_task()["last"]


def test_help_is_asked_for_where_no_answer_was_right_for_two_rounds() -> None:
    assert droughts_of(group([0.0] * 4), group([1.0] * 4, "rev"), rounds=2).never_right() == {"last"}
    assert droughts_of(group([0.0] * 4), rounds=1).never_right() == set()


def test_the_log_says_once_that_help_is_asked_for_that_it_came_and_that_it_worked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    wrong, right = group([0.0] * 8), group([1.0, 0.0])
    droughts = droughts_of(wrong, rounds=2)
    droughts.add_help({"last"}, [right])
    asked = "asked the swarm for help with last: no answer was right in 2 rounds (16 answers)"
    assert caplog.messages == [asked]
    assert droughts.by_task["last"].given == 0, "what came before nobody had asked for"
    droughts.add_round([wrong])
    droughts.add_help({"last"}, [wrong])
    assert caplog.messages == [asked]
    droughts.add_help({"last"}, [right, right, group([1.0], "rev")])
    came = (
        "help came for last: 2 right answers from others, used as their authors are admitted"
        " (asked for in 3 rounds)"
    )
    assert caplog.messages == [asked, came]
    droughts.add_help((), [right])
    assert caplog.messages == [asked, came]
    droughts.add_round([right])
    assert caplog.messages[2:] == [
        "help with last worked: our first right answers, after 3 rounds without one and 3 right answers"
        " from others"
    ]


def test_the_log_does_not_thank_for_what_was_found_without_help(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    droughts = droughts_of(group([0.0] * 8), rounds=2)
    droughts.add_help({"last"}, [])
    droughts.add_round([group([1.0, 0.0])])
    assert [message for message in caplog.messages if "worked" in message] == []


def test_the_advice_says_what_became_of_asking() -> None:
    drought = droughts_of(group([0.0] * 16)).by_task["last"]
    alone = advice_on("last", drought)
    asked = advice_on("last", replace(drought, asked=18))
    helped = advice_on("last", replace(drought, asked=18, given=12))
    assert "was asked" not in alone and "help was asked for in 18 of them, and none came. what helps" in asked
    assert helped.endswith("learning from 12 by others") and "nothing to learn" not in helped
