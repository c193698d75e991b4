"""When a person is told that there is nothing to learn from, and when not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarmnode.node.drought import ROUNDS, Drought, advice, after, after_help, never_right, story
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, Span


def group(rewards: Sequence[float | None], task: str = "last") -> RolloutGroup:
    said = tuple(Completion("a", (97,), (-1.0,), (Span(0, 0, 1),), "stop") for _ in rewards)
    scores = tuple({"reward": reward} for reward in rewards)
    return RolloutGroup(Example(ExampleKey(task, "1", 0, 0), "?"), said, scores, "me", 0)


def droughts_of(*groups: RolloutGroup, rounds: int = ROUNDS) -> dict[str, Drought]:
    droughts: dict[str, Drought] = {}
    for _ in range(rounds):
        droughts = after(droughts, groups)
    return droughts


def test_it_is_said_after_twenty_rounds_without_a_right_answer_and_not_before() -> None:
    wrong = group([0.0] * 8), group([0.0] * 8)
    assert advice(droughts_of(*wrong, rounds=ROUNDS - 1)) == {}
    (said,) = advice(droughts_of(*wrong)).values()
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
    assert expected in advice(droughts_of(*groups))["last"]


def test_it_says_so_where_an_example_always_had_the_same_answer() -> None:
    same, differing = group([1.0] * 4), group([1.0] * 4)
    other = replace(differing.completions[0], token_ids=(98,))
    differing = replace(differing, completions=(other, *differing.completions[1:]))
    advised = "another engine: all answers to an example were the same"
    assert advised in advice(droughts_of(same, group([0.0] * 4)))["last"]
    assert advised not in advice(after(droughts_of(same), [same, differing]))["last"]


def test_one_group_with_a_gradient_ends_it() -> None:
    droughts = droughts_of(group([0.0] * 4))
    assert after(droughts, [group([0.0] * 4), group([0.0, 0.0, 0.0, 0.1])]) == {}


def test_a_task_is_judged_by_its_own_answers() -> None:
    droughts = droughts_of(group([0.0] * 4), group([0.0, 1.0], "rev"), group([None, None], "lost"))
    assert advice(droughts).keys() == {"last", "lost"}, "rev teaches"


def test_a_reward_that_is_always_none_is_told_and_asks_nobody_for_help() -> None:
    assert "in 2 rounds" in advice(droughts_of(group([None, None]), rounds=2))["last"]
    droughts = droughts_of(group([None, None]))
    assert advice(droughts)["last"].startswith("no answer to last had a reward in 20 rounds")
    assert never_right(droughts) == set()
    # As soon as answers have rewards these say what is missing.
    assert "no answer to last was right" in advice(after(droughts, [group([-1.0] * 4)]))["last"]


def test_the_log_says_once_that_help_is_asked_for_that_it_came_and_that_it_worked() -> None:
    wrong, right = group([0.0] * 8), group([1.0, 0.0])
    quiet = droughts_of(wrong, rounds=2)
    asked = after_help(quiet, {"last"}, [right])
    assert story(quiet, asked) == [
        "asked the swarm for help with last: no answer was right in 2 rounds (16 answers)"
    ]
    assert asked["last"].given == 0, "what came before nobody had asked for"
    again = after_help(after(asked, [wrong]), {"last"}, [wrong])
    assert story(asked, again) == []
    helped = after_help(again, {"last"}, [right, right, group([1.0], "rev")])
    assert story(again, helped) == [
        "help came for last: 2 right answers from others, used as their authors are admitted"
        " (asked for in 3 rounds)"
    ]
    assert story(helped, after_help(helped, (), [right])) == []
    (worked,) = story(helped, after(helped, [right]))
    assert worked.startswith("help with last worked: our first right answers, after 3 rounds without one")
    assert story(asked, after(asked, [right])) == [], "nobody helped: we found it ourselves"


def test_the_advice_says_what_became_of_asking() -> None:
    drought = droughts_of(group([0.0] * 16))["last"]
    (alone,) = advice({"last": drought}).values()
    (asked,) = advice({"last": replace(drought, asked=18)}).values()
    (helped,) = advice({"last": replace(drought, asked=18, given=12)}).values()
    assert "was asked" not in alone and "help was asked for in 18 of them, and none came. what helps" in asked
    assert helped.endswith("learning from 12 by others") and "nothing to learn" not in helped
