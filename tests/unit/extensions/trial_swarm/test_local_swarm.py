"""The command lines of a local swarm, and what is told of its nodes."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from swarmnode.extensions.trial_swarm import nat_lab
from swarmnode.extensions.trial_swarm.local_swarm import (
    ALONE,
    LocalNode,
    SwarmPlan,
    arguments,
    arguments_alone,
    run_local_swarm,
)
from swarmnode.extensions.trial_swarm.swarm_story import NodeStory, curves_of, lines_of, read_story
from swarmnode.identity.node_key import NodeKey

PLAN = SwarmPlan(nodes=2, rounds=60, seed=7, assignments=("training.learning_rate=0.001",))
FIRST = {"rev": 0.6, "sort": 0.4, "next": 0.02, "gcd": 0.1}
LAST = {"rev": 0.9, "sort": 0.8, "next": 0.8, "gcd": 0.15}


def nodes() -> list[LocalNode]:
    return [
        LocalNode(
            Path(f"/swarm/node-{number}"), NodeKey(bytes([number]) * 32), 4000 + number, f"/m{number}", ""
        )
        for number in range(2)
    ]


def settings_of(options: list[str]) -> list[str]:
    return [value for flag, value in pairwise(options) if flag == "--set"]


def evaluation(tasks: dict[str, float], round: int = 0, **more: object) -> dict[str, object]:
    return {
        "event": "evaluation",
        "run": "mine",
        "progress.round": round,
        "reward.eval_last": sum(tasks.values()) / len(tasks),
        **{f"reward.eval_tasks.{task}": value for task, value in tasks.items()},
        **more,
    }


def round_done(number: int, reward: float) -> dict[str, object]:
    return {
        "event": "round",
        "run": "mine",
        "progress.round": number,
        "reward.own": reward,
        "training.book_foreign": 10 * number,
    }


EVENTS = [
    evaluation(FIRST),
    round_done(1, 0.2),
    round_done(2, 0.6),
    evaluation(LAST, 2, **{"training.book_foreign": 20}),
]


def test_each_node_has_a_model_and_a_seed_of_its_own_and_all_know_the_first() -> None:
    first, second = (arguments(PLAN, nodes(), number) for number in range(2))
    assert first[first.index("--model") + 1] == "/m0"
    assert second[second.index("--model") + 1] == "/m1"
    assert (first[first.index("--seed") + 1], second[second.index("--seed") + 1]) == ("7", "8")
    assert second[0] == nodes()[0].address
    assert "training.learning_rate=0.001" in settings_of(second)
    assert "network.wait_for_peers=1" in settings_of(second)


@pytest.mark.parametrize(("model", "brings"), [(None, True), ("tiny", True), ("/a/model", False)])
def test_policies_that_are_built_have_their_preset(model: str | None, brings: bool) -> None:
    options = arguments(SwarmPlan(2, 60, 7, model=model), nodes(), 0)
    assert ("--preset" in options) is brings


def test_a_node_alone_differs_from_the_one_in_the_swarm_in_the_exchange_only() -> None:
    together, alone = arguments(PLAN, nodes(), 1), arguments_alone(PLAN, nodes(), 1)
    assert nodes()[0].address not in alone
    for flag in ("--model", "--seed", "--rounds"):
        assert alone[alone.index(flag) + 1] == together[together.index(flag) + 1]
    assert settings_of(alone) == [*PLAN.assignments, *ALONE]
    assert ALONE == ("exchange.enabled=false",)


@pytest.mark.parametrize(
    ("plan", "specialists"),
    [
        (SwarmPlan(3, 60, 0), True),
        (SwarmPlan(3, 60, 0, model="tiny"), False),
        (SwarmPlan(3, 60, 0, model="/mine"), False),
        (SwarmPlan(3, 60, 0, tasks=("last.py",)), False),
    ],
)
def test_nodes_know_different_things_unless_a_model_or_tasks_are_named(
    plan: SwarmPlan, specialists: bool
) -> None:
    assert plan.specialists == specialists


@pytest.fixture
def told(tmp_path: Path) -> Callable[[list[dict[str, object]]], NodeStory]:
    """Returns the story of a node that wrote these events."""

    def story_of(events: list[dict[str, object]]) -> NodeStory:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return read_story(tmp_path, "mine")

    return story_of


def test_a_story_says_what_a_node_knew_and_what_it_learnt(told) -> None:
    story = told(EVENTS)
    assert story.knew == ["rev", "sort"]
    assert story.learnt == {"next": (0.02, 0.8)}, "what it knew got better, and gcd hardly moved"
    assert (story.rewards, story.replayed_from_others) == ((0.2, 0.6), 20)
    assert story.held_out == pytest.approx(0.6625)


def test_who_wrote_nothing_has_an_empty_story_and_another_run_is_none_of_it(told, tmp_path: Path) -> None:
    assert read_story(tmp_path, "mine") == NodeStory()
    before = [{**event, "run": "an earlier one"} for event in EVENTS]
    assert told([*before, round_done(1, 0.1)]).rewards == (0.1,)


def test_the_end_is_told_beside_the_same_node_alone(told) -> None:
    alone = told([evaluation(FIRST), round_done(1, 0.2), evaluation({**LAST, "next": 0.05}, 1)])
    lines = lines_of("otter", told(EVENTS), alone)
    assert lines[0] == "otter knew rev, sort"
    assert "held out 0.66" in lines[1] and lines[2].startswith("  alone")
    assert lines[3] == "  learnt next 0.02 -> 0.80 (0.05 alone), with 20 right answers of others"
    assert len(lines) == 4, "who did not share since has nothing to tell of it"


def test_without_a_comparison_nothing_is_said_of_being_alone(told) -> None:
    lines = lines_of("otter", told(EVENTS[:3]), None)
    assert not any("alone" in line for line in lines)
    assert lines_of("otter", NodeStory(), None)[0] == "otter knew nothing well"


def test_curves_share_one_scale_and_are_no_wider_than_a_line() -> None:
    swarm, alone = curves_of([[0.0, 0.5, 1.0] * 100, [0.5] * 300])
    assert len(swarm) == len(alone) == 30
    assert set(alone) == {"▄"}
    assert curves_of([[], []]) == ["", ""]


def test_homes_know_the_seed_between_them_and_listen_to_whoever_comes() -> None:
    for number in range(2):
        options = arguments(PLAN, nodes(), number, "/ip4/203.0.113.1/tcp/4001/p2p/12D3KooWseed")
        assert options[0] == "/ip4/203.0.113.1/tcp/4001/p2p/12D3KooWseed"
        assert settings_of(options) == ["network.wait_for_peers=1", *PLAN.assignments]


def test_where_no_homes_can_be_had_nothing_is_started_and_it_says_why(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(nat_lab, "why_not", lambda: "only root can make network namespaces")
    with pytest.raises(nat_lab.LabError, match="only root") as raised:
        run_local_swarm(SwarmPlan(nodes=2, rounds=1, seed=0, homes=True), tmp_path, print)
    assert "iproute2" in (raised.value.hint or "")
    assert list(tmp_path.iterdir()) == []
