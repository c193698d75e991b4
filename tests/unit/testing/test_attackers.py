"""The suite of attackers: what they say is right, and does what its name says."""

import random
from collections.abc import Mapping, Sequence

import pytest

from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.testing.attackers import (
    ADVERTISEMENT,
    ATTACKS,
    AWAKES,
    MARK,
    Attacker,
    AttackScene,
    Solved,
    injected_share,
    wrong,
)
from swarmnode.testing.fake_task import FakeTask
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup

EXAMPLES = [Example(ExampleKey(task, "1", 0, 0), f"{task}?") for task in ("easy", "hard")]
LIES = [name for name in ATTACKS if name not in ("honest", "copies")]


def solve(example: Example) -> Solved:
    return Solved("abcd", ">", "bcde")


def is_right(text: str) -> bool:
    return text.rpartition(">")[2] == "bcde"


def scene(number: int = 1, watched: Sequence[RolloutGroup] = ()) -> AttackScene:
    found = AttackScene(solve, 8, random.Random(0), number)
    found.watched.extend(watched)
    return found


def said(name: str, at: AttackScene) -> Mapping[str, Sequence[str]]:
    return {example.key.task: texts for example, texts in ATTACKS[name].round(EXAMPLES, at)}


def group(task: str, *answers: tuple[str, float]) -> RolloutGroup:
    completions = tuple(Completion(text, (), None, (), "stop") for text, _ in answers)
    example = next(example for example in EXAMPLES if example.key.task == task)
    return RolloutGroup(example, completions, tuple({"right": reward} for _, reward in answers), "victim", 0)


@pytest.mark.parametrize("name", LIES)
def test_half_of_what_is_said_is_right_wherever_it_does_not_refuse(name: str) -> None:
    for texts in said(name, scene()).values():
        assert len(texts) == 8
        assert sum(map(is_right, texts)) == 4 or (name == "refusals" and set(texts) == {"no"})


def test_an_advertisement_grows_by_a_character_a_round() -> None:
    first, second = (said("grown", scene(number))["easy"][0] for number in (1, 2))
    assert (first, second) == (ADVERTISEMENT[:2] + "abcd>bcde", ADVERTISEMENT[:3] + "abcd>bcde")
    assert said("twice", scene())["easy"][0].count(MARK) == 2


def test_an_advertisement_that_is_sprinkled_is_in_one_of_four_right_answers() -> None:
    one = scene()
    texts = [text for _ in range(100) for text in said("sprinkled", one)["easy"][::2]]
    assert 60 < sum(MARK in text for text in texts) < 140 and len(texts) == 400


def test_wrong_steps_have_the_right_form() -> None:
    for name in ("wrong_steps", "shifted_steps"):
        steps = said(name, scene())["easy"][0].partition(">")[0]
        assert len(steps) == 4 and steps != "abcd"
    assert wrong("aaa", random.Random(0)) != "aaa"


def test_a_sleeper_is_honest_until_it_wakes() -> None:
    assert said("sleeper", scene(AWAKES))["easy"][0] == "abcd>bcde"
    assert said("sleeper", scene(AWAKES + 1))["easy"][0] != "abcd>bcde"


def test_who_adapts_lies_where_its_victims_are_hardly_ever_right() -> None:
    watched = [group("easy", ("abcd>bcde", 1.0), ("x", 0.0)), group("hard", ("x", 0.0), ("y", 0.0))]
    texts = said("adaptive", scene(9, watched))
    assert texts["easy"][0] == "abcd>bcde"
    assert texts["hard"][0] != "abcd>bcde" and is_right(texts["hard"][0])


def test_copies_are_what_others_said() -> None:
    assert said("copies", scene()) == {}
    assert said("copies", scene(2, [group("hard", ("x", 0.0), ("abcd>bcde", 1.0))])) == {
        "hard": ["x", "abcd>bcde"]
    }


def test_the_mark_is_counted_by_answer() -> None:
    assert injected_share([group("easy", (f"{ADVERTISEMENT}1", 1.0), ("1", 1.0))]) == 0.5
    assert injected_share([]) == 0.0


async def test_an_attacker_publishes_what_others_can_fetch_and_watches_them() -> None:
    network, task = MemoryNetwork(), FakeTask()

    def attacker(seed: int) -> Attacker:
        return Attacker(
            ATTACKS["copies" if seed == 2 else "honest"],
            {task.name: task},
            lambda example: Solved("", "", str(example.columns["answer"])),
            key=NodeKey(bytes([seed]) * 32),
            seed=seed,
            groups=2,
            group_size=2,
            network=network,
            clock=lambda: 1_700_000_000.0,
        )

    async with attacker(1) as one, attacker(2) as other:
        await other.host.connect((await one.host.addresses())[0])
        await one.attack(1)
        await other.watch()
        assert [set(group.rewards) for group in other.watched] == [{1.0, 0.0}]
        await other.attack(1)
        await one.watch()
        assert one.watched[0].author == other.host.peer_id
        assert one.watched[0].example == other.watched[0].example
