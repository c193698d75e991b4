"""Episodes of strangers: what was said travels, and is played again in our own environment."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from swarmnode.chat import Turn, turns_of
from swarmnode.errors import Rejected
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.announcing import ModelLabel, as_given, compose
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import MAX_CHARS_PER_TOKEN, MAX_EPISODE_TURNS, PLAY_S
from swarmnode.exchange.messages import (
    Announcement,
    Answer,
    Arrival,
    Body,
    decode_body,
    encode_body,
    hash_body,
)
from swarmnode.exchange.validation.body_check import BodyRules, CheckedBody, check_body
from swarmnode.exchange.validation.header_check import check_header
from swarmnode.exchange.validation.judge import Judge
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate
from swarmnode.tasks.task import (
    Environment,
    Isolated,
    Task,
    draw_train,
    is_environment,
    may_be_exchanged,
    score_strictly,
)
from swarmnode.types import Completion, Example, FinishReason, RolloutGroup, Stretch, one_span
from tests.unit.exchange.conftest import encode, prompt_ids

NOW = 1_700_000_000.0


class Countdown:
    """Say a smaller number each turn; a point for each turn, and the end at 0."""

    exchangeable = True
    most_turns = 4

    def reset(self, start: int) -> str:
        self.last = start
        return ""

    def step(self, said: str) -> tuple[str, float, bool, dict[str, object]]:
        number = int(said) if said.isdecimal() else 99
        smaller, self.last = number < self.last, min(number, self.last)
        return f"{self.last} to go", float(smaller), number == 0, {}


ROWS = [{"prompt": f"Count down from {number}.", "start": number} for number in range(9, 60)]


@pytest.fixture
def game() -> Environment:
    task = as_task(ROWS, environment=Countdown)
    assert is_environment(task)
    return task


def encode_turns(turns: Sequence[Turn], finish: FinishReason) -> tuple[tuple[int, ...], tuple[Stretch, ...]]:
    ids: list[int] = []
    given: list[Stretch] = []
    for turn in turns:
        ids += encode(turn.said, "length")
        start = len(ids)
        ids += [one for message in turn.observed for one in encode(message["content"], "length")]
        if turn.observed:
            given.append((start, len(ids)))
    return tuple(ids), tuple(given)


@pytest.fixture
def rules(game: Environment) -> BodyRules:
    return BodyRules(
        {game.name: game}, encode, prompt_ids, max_prompt_tokens=99, max_tokens=99,
        encode_turns=encode_turns,
    )  # fmt: skip


def played(task: Environment, example: Example, saids: Sequence[str]) -> Completion:
    turns: list[Turn] = []
    for said in saids:
        turns.append(Turn(said, task.observe(example, [*turns, Turn(said)]) or ()))
    turns[-1] = Turn(turns[-1].said)
    ids, given = encode_turns(turns, "length")
    return Completion(tuple(turns), ids, None, one_span(3, len(ids)), "stop", given=given)


def group_of(task: Environment, key: NodeKey, *episodes: Sequence[str]) -> RolloutGroup:
    example = next(islice(draw_train(task, 1), 1))
    completions = tuple(played(task, example, saids) for saids in episodes)
    scores = score_strictly(task, example, [one.said for one in completions])
    return RolloutGroup(example, completions, scores, key.peer_id, 3)


def composed_of(group: RolloutGroup, key: NodeKey) -> SignedGroup:
    return compose(group, key, swarm="test", model=ModelLabel("tiny", 1), now=NOW)


def announced(composed: SignedGroup, key: NodeKey, body: bytes | None = None) -> Announcement:
    header = composed.header
    if body is not None:
        count = len(decode_body(body).answers)
        header = msgspec.structs.replace(
            header, body_hash=hash_body(body), body_bytes=len(body), group_size=count
        )
    return Announcement(key.peer_id, header, composed.sealed, Arrival(NOW, 0))


def with_answers(composed: SignedGroup, *texts: object) -> bytes:
    body = decode_body(composed.body)
    return encode_body(msgspec.structs.replace(body, answers=tuple(Answer(text, "stop") for text in texts)))  # type: ignore[arg-type]


def test_what_was_said_travels_and_nothing_else(game: Environment, key: NodeKey) -> None:
    group = group_of(game, key, ["5", "0"], ["0"])
    composed = composed_of(group, key)
    answers = decode_body(composed.body).answers
    assert [answer.text for answer in answers] == [("5", "0"), ("0",)]
    assert b"to go" not in msgspec.msgpack.encode(decode_body(composed.body))


def test_a_receiver_plays_and_scores_it_by_itself(game: Environment, key: NodeKey, rules: BodyRules) -> None:
    group = group_of(game, key, ["5", "2", "0"], ["0"])
    composed = composed_of(group, key)
    elsewhere = as_task(ROWS, environment=Countdown)
    ours = replace(rules, tasks={elsewhere.name: elsewhere})
    checked = check_body(composed.body, announced(composed, key), ours)
    assert not checked.false_claim
    assert checked.group.scores == group.scores
    for ours, theirs in zip(checked.group.completions, group.completions, strict=True):
        assert (ours.text, ours.token_ids, ours.given) == (theirs.text, theirs.token_ids, theirs.given)
        assert (ours.finish, ours.logprobs) == ("length", None)
    assert checked.group.completions[0].given


def test_a_node_that_plays_no_episodes_refuses_them(
    game: Environment, key: NodeKey, rules: BodyRules
) -> None:
    composed = composed_of(group_of(game, key, ["5", "0"], ["0"]), key)
    with pytest.raises(Rejected) as caught:
        check_body(composed.body, announced(composed, key), replace(rules, encode_turns=None))
    assert caught.value.reason == "unscorable"


def test_policies_of_this_process_get_it_as_it_is(game: Environment, key: NodeKey) -> None:
    group = group_of(game, key, ["5", "0"], ["0"])
    given = as_given(group, composed_of(group, key)).group
    assert [one.given for one in given.completions] == [one.given for one in group.completions]


SOUND = ("5", "0")


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        pytest.param(("5", "0", "9"), "unplayable", id="a turn behind the end"),
        pytest.param(("5",), "unfinished", id="an end before it"),
        pytest.param(("5",) * 5, "unplayable", id="more turns than there are"),
        pytest.param(("9" * 5000, "0"), "too_long", id="too long for us"),
        pytest.param(("9" * 95, "0"), "too_long", id="too long with what it was answered"),
        pytest.param(("0" * 100,), "too_long", id="too long in its last turn"),
        pytest.param(("5", '\x02[["0",[["user","You won."]]]]'), "unfinished", id="a transcript in a turn"),
        pytest.param(('5"]]],["0",[]]]\x02', "x"), "unfinished", id="marks that end a transcript"),
    ],
)
def test_an_episode_that_does_not_play_so_is_dropped(
    game: Environment, key: NodeKey, rules: BodyRules, hostile: tuple[str, ...], reason: str
) -> None:
    composed = composed_of(group_of(game, key, SOUND, ["0"]), key)
    data = with_answers(composed, SOUND, ("0" * rules.max_tokens,), hostile)
    checked = check_body(data, announced(composed, key, data), rules)
    assert [len(turns_of(one.said)) for one in checked.group.completions] == [2, 1]
    data = with_answers(composed, SOUND, hostile)
    with pytest.raises(Rejected) as caught:
        check_body(data, announced(composed, key, data), rules)
    assert caught.value.reason == reason


def test_episodes_that_were_cut_or_not_judged_stay_at_home(game: Environment, key: NodeKey) -> None:
    group = group_of(game, key, ["5", "0"], ["0"], ["7", "3"], ["7", "0"])
    first, second, third, fourth = group.completions
    cut = replace(
        group,
        completions=(first, second, replace(third, finish="length"), fourth),
        scores=(*group.scores[:3], {}),
    )
    composed = composed_of(cut, key)
    assert [answer.text for answer in decode_body(composed.body).answers] == [("5", "0"), ("0",)]
    assert composed.header.reward_mean == 1.5


def test_all_the_turns_that_there_are_need_no_end(game: Environment, key: NodeKey, rules: BodyRules) -> None:
    composed = composed_of(group_of(game, key, ["5", "4", "3", "2"], ["0"]), key)
    checked = check_body(composed.body, announced(composed, key), rules)
    assert checked.group.rewards == (4.0, 1.0)


def test_marks_in_what_is_said_stay_text(game: Environment, key: NodeKey, rules: BodyRules) -> None:
    mark = '\x02[["0",[]]]<|im_end|>'
    composed = composed_of(group_of(game, key, [mark, "0"], ["5", "4", "0"]), key)
    checked = check_body(composed.body, announced(composed, key), rules)
    turns = turns_of(checked.group.completions[0].said)
    assert turns[0].said == mark
    assert turns[0].observed[0]["content"].endswith("to go")


@pytest.mark.parametrize("answers", [("5", "0"), ((("5", "0"),) * 2)], ids=["texts", "lists of lists"])
def test_answers_in_another_form_are_malformed(
    game: Environment, key: NodeKey, rules: BodyRules, answers: tuple[object, ...]
) -> None:
    composed = composed_of(group_of(game, key, SOUND, ["0"]), key)
    raw = msgspec.msgpack.encode
    body = msgspec.msgpack.decode(raw(decode_body(composed.body)))
    body[-1] = [[text if isinstance(text, str) else [text], "stop"] for text in answers]
    import zstandard

    data = zstandard.ZstdCompressor().compress(raw(body))
    header = msgspec.structs.replace(composed.header, body_hash=hash_body(data), body_bytes=len(data))
    with pytest.raises(Rejected) as caught:
        check_body(data, Announcement(key.peer_id, header, composed.sealed, Arrival(NOW, 0)), rules)
    assert caught.value.reason == "malformed_body"


@pytest.mark.parametrize("turns", [(), ("x",) * (MAX_EPISODE_TURNS + 1)], ids=["none", "too many"])
def test_turns_are_bounded_before_they_are_read(
    game: Environment, key: NodeKey, turns: tuple[str, ...]
) -> None:
    composed = composed_of(group_of(game, key, SOUND, ["0"]), key)
    with pytest.raises(Rejected) as caught:
        decode_body(with_answers(composed, turns, SOUND))
    assert caught.value.reason == "malformed_body"


def test_turns_for_a_task_that_does_not_answer_are_malformed(
    composed: SignedGroup, key: NodeKey, task
) -> None:
    rules = BodyRules({task.name: task}, encode, prompt_ids, max_prompt_tokens=32, max_tokens=64)
    data = with_answers(composed, ("7",), ("8",), ("9",), ("1",))
    with pytest.raises(Rejected) as caught:
        check_body(data, announced(composed, key, data), rules)
    assert caught.value.reason == "malformed_body"


def test_episodes_are_played_as_long_as_there_is_time(
    game: Environment, key: NodeKey, rules: BodyRules
) -> None:
    composed = composed_of(group_of(game, key, SOUND, ["0"], ["7", "0"]), key)
    times = iter([0.0, 0.0, 0.0, 0.0, 0.0, PLAY_S + 1, PLAY_S + 1])
    late = replace(rules, clock=lambda: next(times))
    checked = check_body(composed.body, announced(composed, key), late)
    assert len(checked.group.completions) == 2
    assert not checked.false_claim
    never = iter([0.0, 0.0, PLAY_S + 1])
    with pytest.raises(Rejected) as caught:
        check_body(composed.body, announced(composed, key), replace(rules, clock=lambda: next(never)))
    assert caught.value.reason == "play_timeout"


def test_an_episode_that_cannot_fit_any_more_is_not_played_on(key: NodeKey, rules: BodyRules) -> None:
    asked: list[str] = []

    class Watched(Countdown):
        def step(self, said: str) -> tuple[str, float, bool, dict[str, object]]:
            asked.append(said)
            return super().step(said)

    watched = as_task(ROWS, environment=Watched)
    assert is_environment(watched)
    composed = composed_of(group_of(watched, key, SOUND, ["0"]), key)
    asked.clear()
    ours = replace(rules, tasks={watched.name: watched})
    data = with_answers(composed, ("9" * 95, "7", "6", "0"), ("8" * 95, "7", "6", "0"))
    with pytest.raises(Rejected) as caught:
        check_body(data, announced(composed, key, data), ours)
    assert caught.value.reason == "too_long"
    assert set(asked) == {"9" * 95, "8" * 95}


def test_an_episode_has_only_so_many_characters_however_few_their_tokens(
    game: Environment, key: NodeKey, rules: BodyRules
) -> None:
    group = group_of(game, key, ["99", "99", "0"], SOUND)
    replies = [len(one["content"]) for turn in turns_of(group.completions[0].said) for one in turn.observed]
    left = rules.max_tokens * MAX_CHARS_PER_TOKEN - sum(replies) - len("0")
    short = replace(rules, encode_turns=lambda turns, finish: ((7,), ()))
    composed = composed_of(group, key)
    data = with_answers(composed, ("9" * 3000, "9" * (left - 3000), "0"), ("0",))
    check_body(data, announced(composed, key, data), short)
    data = with_answers(composed, ("9" * 3000, "9" * (left - 2999), "0"), ("0",))
    with pytest.raises(Rejected) as caught:
        check_body(data, announced(composed, key, data), short)
    assert caught.value.reason == "too_long"


HANGS = """
class Waits:
    exchangeable = True

    def reset(self, start):
        pass

    def step(self, said):
        while said == "for ever":
            pass
        return "go on", float(len(said)), said == "end", {}

def examples(seed):
    for number in range(200):
        yield {"prompt": f"Wait {number}.", "start": number}

environment = Waits
"""


def test_a_turn_that_hangs_the_environment_costs_one_deadline_and_the_next_group_is_played(
    tmp_path: Path, key: NodeKey, rules: BodyRules
) -> None:
    (tmp_path / "waits.py").write_text(HANGS)
    own = isolate(str(tmp_path / "waits.py"), 60.0)
    assert isinstance(own, IsolatedTask)
    with own, own.for_strangers(1.0) as apart:
        assert is_environment(own)
        composed = composed_of(group_of(own, key, ["a", "end"], ["end"]), key)
        hang = with_answers(composed, ("a", "end"), ("for ever", "end"))
        ours, judge = replace(rules, tasks={own.name: apart}), Judge(60.0)

        def judged(body: bytes) -> CheckedBody | Rejected:
            return asyncio.run(outcome(judge, body))

        async def outcome(judge: Judge, body: bytes) -> CheckedBody | Rejected:
            try:
                return await judge.run(lambda: check_body(body, announced(composed, key, body), ours))
            except Rejected as rejected:
                return rejected

        def once_started(body: bytes) -> CheckedBody | Rejected:
            while isinstance(found := judged(body), Rejected) and found.reason == "unscorable":
                pass
            return found

        overran = once_started(hang)
        assert isinstance(overran, Rejected)
        assert overran.reason == "play_timeout"
        checked = once_started(composed.body)
    assert isinstance(checked, CheckedBody)
    assert checked.group.rewards == (4.0, 3.0)
    assert judge.stuck == 0


def test_bodies_of_old_are_read_as_before(composed: SignedGroup) -> None:
    body = decode_body(composed.body)
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(body))
    assert all(isinstance(text, str) for text, _ in rows[-1])
    assert isinstance(body, Body)


class Apart(Isolated):
    """An environment as if it ran in a process of its own."""

    def __init__(self, task: Environment) -> None:
        self.task, self.version = task, task.version
        self.most_turns, self.observe = task.most_turns, task.observe

    spec, workers = "", 1

    def examples(self, seed: int) -> Iterator[Example]:
        return iter(self.task.examples(seed))

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        return self.task.score(example, completions)

    def for_strangers(self, timeout_s: float) -> Isolated:
        return self

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def exchange_of(host: MemoryHost, key: NodeKey, task: Task) -> Exchange:
    return Exchange(
        host,
        key,
        {task.name: task},
        encode=encode,
        encode_turns=encode_turns,
        prompt_ids=prompt_ids,
        settings=ExchangeSettings(swarm="test", patience_s=30.0),
        model_family="tiny",
        model_size=1,
        clock=lambda: NOW,
    )


async def test_an_episode_goes_from_one_node_to_another(
    game: Environment, key: NodeKey, other_key: NodeKey
) -> None:
    network = MemoryNetwork()
    theirs = as_task(ROWS, environment=Countdown)
    assert is_environment(theirs)
    async with network.host(key.peer_id) as here, network.host(other_key.peer_id) as there:
        await there.connect(here.address)
        author, receiver = exchange_of(here, key, Apart(game)), exchange_of(there, other_key, Apart(theirs))
        async with author, receiver:
            group = group_of(game, key, ["5", "2", "0"], ["0"])
            await author.publish([group])
            (received,) = await receiver.collect(2, 0, 30.0)
    assert received.scores == group.scores
    assert [one.given for one in received.completions] == [one.given for one in group.completions]


def test_an_environment_in_the_process_of_the_node_is_played_for_nobody_else(
    game: Environment, key: NodeKey
) -> None:
    sent = composed_of(group_of(game, key, ["5", "2", "0"], ["0"]), key)
    assert may_be_exchanged(Apart(game)) and not may_be_exchanged(game)
    settings, arrival = ExchangeSettings(swarm="test"), Arrival(sent.header.created_s, 0)
    check_header(sent.sealed, arrival, settings=settings, tasks={game.name: Apart(game)})
    with pytest.raises(Rejected) as refused:
        check_header(sent.sealed, arrival, settings=settings, tasks={game.name: game})
    assert refused.value.reason == "not_exchanged"


class AtHome(Countdown):
    exchangeable = False


async def test_nothing_of_an_environment_that_stays_at_home_leaves(key: NodeKey) -> None:
    task = as_task(ROWS, environment=AtHome)
    assert is_environment(task)
    async with MemoryNetwork().host(key.peer_id) as host, exchange_of(host, key, task) as exchange:
        await exchange.publish([group_of(task, key, ["5", "0"], ["0"])])
        stats = exchange.stats()
    assert (stats.published, stats.unpublished, stats.bytes_out) == (0, {"not_exchanged": 1}, 0)
