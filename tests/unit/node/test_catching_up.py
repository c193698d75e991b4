"""A node that begins late: what it borrows, what its rounds are made of, and when they are usual again."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library import borrower
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import signed_group
from swarmnode.identity.node_key import NodeKey
from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.node.catching_up import (
    BORROWED_EVERY,
    ENOUGH_ANSWERS,
    HURRIED_FOR,
    KEPT,
    LEAST_ANSWERS,
    LEAST_RATE,
    MOST_ROUNDS,
    PATIENCE,
    RATE,
    RATE_BACK,
    RATE_HALVED_AFTER,
    STEP_ANSWERS,
    STEPS,
    WINDOW,
    CatchingUp,
    LibraryRound,
    RoundMix,
    library_round,
    phase_change,
    rises,
)
from swarmnode.node.learner import Overlap
from swarmnode.node.node import NodeLoop
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.node.showing.board import StatusBoard
from swarmnode.node.showing.node_status import NodeStatus, measurements
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.tasks.task import Task, draw_train, score_strictly
from swarmnode.testing import FakeLearner
from swarmnode.testing.fake_task import FakeTask
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters, TrainReport
from swarmnode.training.rules.rules import uses_library
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, Scores, one_span
from tests.own_rules import TRUSTING
from tests.unit.node.test_node import NeverRight, Recorder, encode, node, prompt_ids, run

VETERAN, NEWCOMER = NodeKey(b"\1" * 32), NodeKey(b"\2" * 32)
DAY_S = 86400.0


# ---- the decision ----


def after(state: CatchingUp, *rewards: float) -> CatchingUp:
    for reward in rewards:
        state = state.after_round(LibraryRound(0, 0, reward, 1.0))
    return state


def begun() -> CatchingUp:
    return CatchingUp().after_round(LibraryRound(100, 0, 0.1, 5.0))


def test_a_few_answers_are_learnt_beside_usual_rounds() -> None:
    state = CatchingUp().after_round(LibraryRound(LEAST_ANSWERS - 1, 0, 0.1, 5.0))
    assert state.phase == "before" and state.mix(Config()) is None
    assert state.after_round(LibraryRound(LEAST_ANSWERS, 0, 0.1, 5.0)).phase == "on"


def test_answers_that_waited_for_their_author_count_when_he_teaches() -> None:
    state = begun().after_round(LibraryRound(400, 0, 0.1, 5.0))
    assert (state.answers, state.rounds_worth) == (400, 80)
    assert state.after_round(LibraryRound(390, 0, 0.1, 5.0)).answers == 400, "replaced by later ones"


def test_who_comes_back_with_much_of_a_book_is_no_newcomer() -> None:
    state = CatchingUp().after_round(LibraryRound(LEAST_ANSWERS, 1900, 0.1, 5.0))
    assert state.phase == "over" and phase_change(CatchingUp(), state, 2, 3) == ""
    grown = CatchingUp().after_round(LibraryRound(LEAST_ANSWERS, 900, 0.1, 5.0))
    assert grown.phase == "on", "what it found meanwhile is not so much"


def test_it_goes_on_while_the_reward_rises_and_ends_when_it_does_not() -> None:
    rising = [0.02 * number for number in range(30)]
    assert after(begun(), *rising).phase == "on"
    flat = after(begun(), *rising, *[0.5] * (WINDOW + PATIENCE))
    assert flat.phase == "over" and flat.mix(Config()) is None
    assert flat.after_round(LibraryRound(1000, 0, 0.0, 1.0)).phase == "over", "once each start"


def test_it_ends_whatever_the_reward_does() -> None:
    state = after(begun(), *(0.001 * number for number in range(MOST_ROUNDS)))
    assert (state.phase, state.rounds) == ("over", MOST_ROUNDS)


def test_a_single_lucky_round_does_not_carry_it_on() -> None:
    assert not rises((*[0.3] * WINDOW, 1.0, *[0.1] * (WINDOW + PATIENCE)))


def test_a_round_has_few_own_groups_and_several_steps_of_the_book() -> None:
    config = load_config(environ={}, assignments=["rollout.groups=16"]).config
    first = RoundMix(2, STEPS * STEP_ANSWERS, STEP_ANSWERS, rate=RATE, kept=KEPT)
    assert begun().mix(config) == first


def rate_of(state: CatchingUp) -> float:
    mix = state.mix(Config())
    return 1.0 if mix is None else mix.rate


def test_steps_become_smaller_with_the_answers_that_were_replayed() -> None:
    report = TrainReport(replayed=RATE_HALVED_AFTER // 4)
    states = [begun()]
    for _ in range(8):
        states.append(states[-1].after_round(library_round([], 100, report, Config())))
    rates = [rate_of(state) for state in states]
    assert rates == sorted(set(rates), reverse=True)
    assert rates[4] == pytest.approx(rates[0] / 2) and rates[8] == pytest.approx(rates[0] / 3)
    assert rate_of(after(begun(), 0.1, 0.2)) == rates[0], "nothing was replayed"


def test_after_catching_up_the_learning_rate_comes_back_slowly() -> None:
    state = begun().after_round(LibraryRound(100, 0, 0.1, 1.0, replayed=9 * RATE_HALVED_AFTER))
    while state.phase == "on":
        state = after(state, 0.1)
    config = Config()
    assert state.mix(config) == RoundMix(config.rollout.groups, None, None, rate=state.rate)
    assert state.rate == pytest.approx(RATE / 10)
    assert rate_of(after(state, 0.1, 0.1)) == pytest.approx(RATE / 10 * RATE_BACK**2)
    back = after(state, *[0.1] * 500)
    assert back.mix(config) is None


def test_the_learning_rate_has_a_floor() -> None:
    state = begun().after_round(LibraryRound(100, 0, 0.1, 1.0, replayed=1000 * RATE_HALVED_AFTER))
    assert rate_of(state) == LEAST_RATE


def test_who_catches_up_again_after_a_restart_begins_at_the_rate_of_before() -> None:
    resumed = CatchingUp(rate=0.2)
    assert rate_of(resumed) == 0.2
    assert rate_of(resumed.after_round(LibraryRound(100, 0, 0.1, 5.0))) == 0.2 * RATE


def test_much_is_borrowed_until_the_book_has_enough_and_little_after_that() -> None:
    rich = CatchingUp().after_round(LibraryRound(ENOUGH_ANSWERS, 0, 0.1, 5.0))
    states = (CatchingUp(), *(after(rich, *[0.1] * rounds) for rounds in range(BORROWED_EVERY + 1)))
    first, beside, *later = (state.groups_to_borrow(Config()) for state in states)
    assert first > beside > 0
    assert later == [0] * (BORROWED_EVERY - 1) + [beside]


def test_while_the_book_has_little_it_borrows_on_but_not_for_ever() -> None:
    state, borrowed = CatchingUp(), list[int]()
    for _ in range(HURRIED_FOR + 2):
        borrowed.append(state.groups_to_borrow(Config()))
        state = state.after_round(LibraryRound(100, 0, 0.1, 5.0))
    first, *much, last = borrowed
    assert first > much[0] and much == much[:1] * HURRIED_FOR
    assert last < much[0], "liars wait for ever"


def test_the_log_says_what_it_brought() -> None:
    state = CatchingUp().after_round(LibraryRound(100, 0, 0.1, 5.0))
    assert "100 right answers of 3 authors, from the libraries of 2 peers" in phase_change(
        CatchingUp(), state, 2, 3
    )
    assert "from the library of this home" in phase_change(CatchingUp(), state, 0, 3), "a file was taken in"
    over = after(state, *[0.1] * WINDOW, *[0.6] * (WINDOW + PATIENCE))
    said = phase_change(state, over, 2, 3)
    assert "our own sampling would have needed 20 rounds" in said
    assert said.endswith("the learning rate is 100% of what is set and grows by 0.5% a round")
    assert phase_change(state, state, 2, 3) == ""
    nothing = CatchingUp().after_round(LibraryRound(100, 0, 0.0, 0.0))
    assert nothing.rounds_worth is None


def test_who_keeps_no_answers_has_no_library() -> None:
    def uses(*settings: str) -> bool:
        return uses_library(load_config(environ={}, assignments=settings).config)

    off = ("exchange.library=false", "exchange.rule=sapo", "exchange.rule=own_book", "exchange.enabled=false")
    assert uses() and not any(map(uses, off))


# ---- in a node ----


class Greet:
    """Whoever says `ok` is right, which a policy that knows nothing does not."""

    name = "greet"
    version = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        for index in range(1000):
            yield Example(ExampleKey(self.name, self.version, seed, index), f"say {seed % 1000} {index}=")

    def score(self, example: Example, completions: Sequence[str]) -> list[Scores]:
        return [{"ok": float(text == "ok")} for text in completions]


def shelf_of(task: Task, count: int, right: str | None = None) -> tuple[Shelf, set[tuple[str, ExampleKey]]]:
    """What a veteran has kept for a day: groups with one right answer of two."""
    shelf, origins = Shelf(), set[tuple[str, ExampleKey]]()
    for example in islice(draw_train(task, 77), count):
        texts = [right or str(example.columns["answer"]), "nothing"]
        completions = tuple(Completion(text, (1,), None, one_span(1, 1), "stop") for text in texts)
        group = RolloutGroup(example, completions, score_strictly(task, example, texts), VETERAN.peer_id, 1)
        label = ModelLabel("fake", 1)
        sent = compose(group, VETERAN, swarm="commons", model=label, now=1_700_000_000.0 - DAY_S)
        shelf.offer(signed_group(sent.sealed, sent.body))
        origins.add((VETERAN.peer_id, example.key))
    return shelf, origins


def exchange_of(
    host: MemoryHost, key: NodeKey, task: Task, shelf: Shelf, renderer: Renderer | None = None
) -> Exchange:
    return Exchange(
        host,
        key,
        {task.name: task},
        encode=encode if renderer is None else renderer.encode_completion,
        prompt_ids=prompt_ids if renderer is None else renderer.prompt_ids,
        settings=ExchangeSettings(fetch_timeout_s=2.0, patience_s=0.01),
        model_family="fake",
        model_size=1,
        shelf=shelf,
    )


async def veteran(
    stack: AsyncExitStack, network: MemoryNetwork, task: Task, count: int, right: str | None = None
) -> MemoryHost:
    """A peer that lends and does nothing else."""
    shelf, origins = shelf_of(task, count, right)
    host = await stack.enter_async_context(network.host(VETERAN.peer_id))
    exchange = await stack.enter_async_context(exchange_of(host, VETERAN, task, shelf))
    assert exchange.library is not None
    exchange.library.note_book(origins)
    return host


async def newcomer(
    stack: AsyncExitStack,
    network: MemoryNetwork,
    lender: MemoryHost,
    task: Task,
    renderer: Renderer | None = None,
) -> NetworkParts:
    host = await stack.enter_async_context(network.host(NEWCOMER.peer_id))
    await host.connect(lender.address)
    return NetworkParts(host, exchange_of(host, NEWCOMER, task, Shelf(), renderer), None)


async def test_a_newcomer_borrows_says_so_and_ends_with_usual_rounds() -> None:
    learner, seen, network = FakeLearner(NEWCOMER.peer_id, round_s=0.01), Recorder(), MemoryNetwork()
    async with AsyncExitStack() as stack:
        lender = await veteran(stack, network, FakeTask(), 60)
        parts = await newcomer(stack, network, lender, FakeTask())
        loop = node(learner, "node.rounds=400", "exchange.external_groups=4", network=parts, monitor=seen)
        async with asyncio.timeout(60), loop:
            running = asyncio.create_task(loop.run())
            while not (None in learner.mixes or running.done()):  # noqa: ASYNC110  no event
                await asyncio.sleep(0.01)
            loop.request_stop()
            await running
    first, *_, last = learner.mixes
    assert first is not None and first.groups == 1 and last is None
    taught = {group.example.key for _, others in learner.trained for group in others}
    assert len(taught) == 60
    status: NodeStatus = seen.rounds[-1]
    assert status.library.borrowed == 60 and status.library.lenders == 1
    assert not status.library.catching_up
    assert status.library.answers == sum(learner.origins().values()), "in whatever round they entered"
    assert measurements(status)["library.rounds"] == status.library.rounds > WINDOW


class Replays(FakeLearner):
    """Replays much of the book in every round."""

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        return msgspec.structs.replace(super().train(own, external), replayed=RATE_HALVED_AFTER)


async def test_a_restart_continues_at_the_learning_rate_that_was_reached() -> None:
    first, network = Replays(NEWCOMER.peer_id, round_s=0.01), MemoryNetwork()
    async with AsyncExitStack() as stack:
        lender = await veteran(stack, network, FakeTask(), 60)
        parts = await newcomer(stack, network, lender, FakeTask())
        loop = node(first, "node.rounds=400", "exchange.external_groups=4", network=parts)
        async with asyncio.timeout(60), loop:
            running = asyncio.create_task(loop.run())
            while not (len(first.mixes) > 3 or running.done()):  # noqa: ASYNC110  no event
                await asyncio.sleep(0.01)
            loop.request_stop()
            await running
    _, saved = first.disk[-1]
    done, rate = saved.round, saved.rate_share
    assert rate < RATE / 2
    falling = [mix.rate for mix in first.mixes[:4] if mix]
    assert falling == sorted(set(falling), reverse=True)
    second = FakeLearner(NEWCOMER.peer_id, disk=first.disk)
    host = MemoryNetwork().host(NEWCOMER.peer_id)
    parts = NetworkParts(host, exchange_of(host, NEWCOMER, FakeTask(), Shelf()), None)
    async with host:
        summary = await run(node(second, f"node.rounds={done + 2}", network=parts))
    assert summary.rounds == done + 2
    rates = [mix.rate for mix in second.mixes if mix]
    assert rates == pytest.approx([rate * RATE_BACK**number for number in range(3)])


async def test_the_learning_rate_comes_back_where_there_is_no_library_any_more() -> None:
    caught_up = FakeLearner("me")
    caught_up.disk.append((3, Counters(round=3, rate_share=0.5)))
    learner = FakeLearner("me", disk=caught_up.disk)
    await run(node(learner, "node.rounds=5"))
    rates = [mix.rate for mix in learner.mixes if mix]
    assert rates == pytest.approx([0.5 * RATE_BACK**number for number in range(3)])
    assert learner.disk[-1][1].rate_share == rates[-1]


async def test_a_node_in_a_drought_asks_for_libraries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("LOOK_FOR_S", "LOOK_EVERY_S", "LOOK_LATE_S"):
        monkeypatch.setattr(borrower, setting, 0.01)
    for learner, groups in ((FakeLearner(NEWCOMER.peer_id), 1), (NeverRight(99, NEWCOMER.peer_id), 4)):
        monkeypatch.setattr(borrower, "AGAIN_S", 3600.0)
        network = MemoryNetwork()
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            shelf, origins = shelf_of(FakeTask(), 4)
            lender = await stack.enter_async_context(network.host(VETERAN.peer_id))
            lending = await stack.enter_async_context(exchange_of(lender, VETERAN, FakeTask(), shelf))
            assert lending.library is not None
            lending.library.note_book({min(origins, key=lambda origin: origin[1].index)})
            parts = await newcomer(stack, network, lender, FakeTask())
            loop = node(learner, "node.rounds=5", network=parts)
            library = parts.exchange.library
            assert library is not None
            await stack.enter_async_context(loop)
            while not library._done:  # noqa: ASYNC110  counters have no event
                await asyncio.sleep(0.01)
            assert lending.library.pages.served == 2, "all of it was seen"
            lending.library.note_book(origins)
            monkeypatch.setattr(borrower, "AGAIN_S", 0.0)
            await loop.run()
            while library.groups < groups:  # noqa: ASYNC110  counters have no event
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert library.groups == groups


async def test_without_a_library_nothing_is_asked() -> None:
    learner, network = FakeLearner(NEWCOMER.peer_id), MemoryNetwork()
    async with AsyncExitStack() as stack:
        lender = await veteran(stack, network, FakeTask(), 40)
        host = await stack.enter_async_context(network.host(NEWCOMER.peer_id))
        await host.connect(lender.address)
        plain = Exchange(
            host,
            NEWCOMER,
            {"sum": FakeTask()},
            encode=encode,
            prompt_ids=prompt_ids,
            settings=ExchangeSettings(patience_s=0.01),
            model_family="fake",
            model_size=1,
        )
        await run(node(learner, "node.rounds=3", network=NetworkParts(host, plain, None)))
    assert learner.mixes == [] and not any(others for _, others in learner.trained)


def has_learnt(seen: Recorder) -> bool:
    return bool(seen.rounds) and (seen.rounds[-1].reward.own or 0.0) > 0.9


async def test_a_policy_that_never_found_an_answer_learns_it_from_a_library(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = [
        "rollout.groups=8",
        "rollout.group_size=4",
        "rollout.max_tokens=6",
        "rollout.mode='sync'",
        "rollout.overlap='off'",
        "training.learning_rate=4e-3",
        "tasks.eval_examples=4",
        "node.rounds=60",
        "node.eval_every=0",
        "exchange.external_groups=8",
        f"exchange.rule={TRUSTING}",
    ]
    config = load_config(environ={}, assignments=settings).config
    base, task, seen = load_base_model(str(tiny_model), config.policy), Greet(), Recorder()
    renderer = Renderer(base.tokenizer, base.eos_token_ids)
    learner = PolicyLearner(
        config,
        Policy(base, config.policy, seed=0),
        EmbeddedEngine(base.model, base.eos_token_ids, max_slots=32, max_length=64),
        renderer,
        {"greet": task},
        CheckpointStore(tmp_path / "quick"),
        author=NEWCOMER.peer_id,
        seed=2,
        overlap=Overlap(on=False, sleep=False, reason="as set"),
    )
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        lender = await veteran(stack, network, task, 64, right="ok")
        parts = await newcomer(stack, network, lender, task, renderer)
        board = StatusBoard(config, peer_id=NEWCOMER.peer_id, name="new", model="quick")
        loop = NodeLoop(config, learner, board, seen, seed=2, network=parts)
        async with asyncio.timeout(120), loop:
            running = asyncio.create_task(loop.run())
            while not (running.done() or has_learnt(seen)):  # noqa: ASYNC110  no event
                await asyncio.sleep(0.01)
            loop.request_stop()
            summary = await running
    assert summary.reward_first == 0.0 and (seen.rounds[0].reward.own or 0.0) == 0.0
    assert has_learnt(seen)
    assert seen.rounds[-1].library.rounds > 0
