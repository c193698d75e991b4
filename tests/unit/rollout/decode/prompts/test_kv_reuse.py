"""Keys and values kept between the turns of conversations: nobody notices but the clock."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from swarmnode.extensions.native import compiler
from swarmnode.rollout.decode.decoder import Decoder
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.decode.prompts import prompt_store
from swarmnode.rollout.decode.prompts.kv_reuse import KeptConversation, KeptStore, continue_batch
from swarmnode.rollout.decode.running_rows import DecodePolicy
from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import BASE_VERSION, Engine, InFlight, Output, Request
from swarmnode.rollout.shared_engine import SharedEngine, versions_needed
from tests.conversations import Talk
from tests.families import DENSE, dense
from tests.unit.rollout.conftest import VOCAB
from tests.unit.rollout.decode.test_embedded import random_policy

Run = Callable[..., dict[str, Output]]


def tokens(rng: random.Random, longest: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest)))


def talks(count: int, longest: int = 30) -> list[Talk]:
    rng = random.Random(5)
    return [Talk(str(i), tokens(rng, longest), seed=i) for i in range(count)]


def play(
    engine: Engine,
    run: Run,
    goes_on: bool,
    started: Sequence[Talk],
    turns: int = 4,
    within: Callable[[int, Engine], None] = lambda turn, engine: None,
) -> list[Talk]:
    """All turns of conversations; `within` is called in the midst of each turn."""
    rng, now = random.Random(6), list(started)
    for turn in range(turns):
        if turn:
            now = [talk.told(tokens(rng, 25)) for talk in now]
        engine.submit([talk.request(goes_on) for talk in now])
        outputs = {output.request_id: output for _ in range(2) for output in engine.step()}
        within(turn, engine)
        outputs |= run(engine, [])
        now = [talk.with_said(outputs[talk.name].sampled) for talk in now]
    return now


def assert_alike(found: Sequence[Talk], expected: Sequence[Talk], tolerance: float = 1e-4) -> None:
    for talk, other in zip(found, expected, strict=True):
        assert talk.said.token_ids == other.said.token_ids
        assert talk.said.logprobs == pytest.approx(other.said.logprobs, abs=tolerance)
        assert (talk.said.spans, talk.said.given) == (other.said.spans, other.said.given)


def small(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    model = dense(family, **{name: size for name, size in sizes.items() if name not in DENSE[family]})
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.to(dtype).eval()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("family", sorted(DENSE))
def test_a_turn_is_the_same_whether_what_was_before_is_kept_or_computed_again(
    family: str, kernels: bool, run: Run
) -> None:
    """More conversations than rows, of all lengths, some beyond the windows of the family."""
    model = small(family)
    with nullcontext() if kernels else compiler.turned_off():
        kept, again = (EmbeddedEngine(model, (), max_slots=5) for _ in range(2))
        assert_alike(play(kept, run, True, talks(9)), play(again, run, False, talks(9)))
    assert kept.stats().kept_tokens > kept.stats().reprefilled_tokens
    read = kept.stats().kept_tokens + kept.stats().reprefilled_tokens
    assert (again.stats().kept_tokens, again.stats().reprefilled_tokens) == (0, read)


def test_in_bfloat16_it_is_the_same_to_its_rounding(run: Run) -> None:
    model = small("qwen3", torch.bfloat16)
    kept, again = EmbeddedEngine(model, ()), EmbeddedEngine(model, ())
    first = play(kept, run, True, talks(6), turns=1)
    asked = [talk.told((3, 1, 4, 1, 5)) for talk in first]
    found, expected = (
        run(engine, [talk.request(goes_on=False) for talk in asked]) for engine in (kept, again)
    )
    assert kept.stats().kept_tokens > 0
    for talk in asked:
        one, other = (outputs[talk.name].sampled.logprobs[len(talk.said)] for outputs in (found, expected))
        assert one == pytest.approx(other, abs=0.1)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_new_policy_in_the_midst_of_a_turn_leaves_nothing_behind(
    mode: InFlight, tiny: PreTrainedModel, run: Run
) -> None:
    def updating(turn: int, engine: Engine) -> None:
        engine.set_policy(random_policy(tiny, turn + 1), mode)

    found: list[list[Talk]] = []
    for goes_on in (True, False):
        engine = EmbeddedEngine(tiny, (), max_slots=4)
        found.append(play(engine, run, goes_on, talks(7), within=updating))
    assert_alike(found[0], found[1])


def test_between_two_updates_everything_is_kept(tiny: PreTrainedModel, run: Run) -> None:
    def updating(turn: int, engine: Engine) -> None:
        if turn == 0:
            engine.set_policy(random_policy(tiny, 1), "recompute")

    engine = EmbeddedEngine(tiny, ())
    play(engine, run, True, talks(6), within=updating)
    assert engine.stats().kept_tokens > engine.stats().reprefilled_tokens


def test_turns_that_begin_together_share_a_pass_over_what_is_new(
    tiny: PreTrainedModel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[int]] = []

    def counting(
        decoder: Decoder, layers: Layers, sequences: list[tuple[int, ...]], kept: list[KeptConversation]
    ):
        passes.append([len(ids) - one.computed for ids, one in zip(sequences, kept, strict=True)])
        return continue_batch(decoder, layers, sequences, kept)

    monkeypatch.setattr(prompt_store, "continue_batch", counting)
    engine = EmbeddedEngine(tiny, ())
    outputs = run(engine, [talk.request(goes_on=True) for talk in talks(8)])
    ended = [t.with_said(outputs[t.name].sampled) for t in talks(8) if outputs[t.name].finish == "stop"]
    run(engine, [talk.told((7,) * (1 + i)).request(goes_on=True) for i, talk in enumerate(ended)])
    assert passes == [[2 + i for i in range(len(ended))]]
    assert len(ended) > 3


def stopped(engine: Engine, run: Run, version: int | None = None) -> Talk:
    """A conversation whose first turn has ended and is kept."""
    talk = Talk("a", (5, 40, 41, 42, 43, 44), seed=1, version=version)
    output = run(engine, [talk.request(goes_on=True)])["a"]
    assert output.finish == "stop"
    return talk.with_said(output.sampled)


def kept_in(engine: EmbeddedEngine) -> int:
    """Tokens whose keys and values it keeps."""
    return engine._prompts.kept.tokens


def endless(talk: Talk) -> Request:
    """A turn that only its length ends."""
    request = talk.request(goes_on=True)
    return replace(request, sampling=replace(request.sampling, max_tokens=90, stop_token_ids=()))


def again_in(engine: Engine, run: Run, talk: Talk) -> int:
    """Kept tokens that the next turn of this conversation finds."""
    before = engine.stats().kept_tokens
    run(engine, [talk.told((50, 51)).request(goes_on=False)])
    return engine.stats().kept_tokens - before


def test_a_conversation_that_goes_on_differently_finds_nothing(tiny: PreTrainedModel, run: Run) -> None:
    engine, alone = EmbeddedEngine(tiny, ()), EmbeddedEngine(tiny, ())
    talk = stopped(engine, run)
    told = talk.told((50, 51))
    said = told.said
    other = told.with_said(replace(said, token_ids=(said.token_ids[0] % 60 + 1, *said.token_ids[1:])))
    found, expected = (run(one, [other.request(goes_on=False)])["a"] for one in (engine, alone))
    assert found.token_ids == expected.token_ids
    assert found.kept_tokens == engine.stats().kept_tokens == 0
    assert again_in(engine, run, talk) == len(talk.prompt) + len(talk.said) - 1


def test_only_what_stops_and_may_go_on_is_kept(tiny: PreTrainedModel, run: Run) -> None:
    engine = EmbeddedEngine(tiny, ())
    run(engine, [talk.request(goes_on=False) for talk in talks(4)])
    run(engine, [endless(talk) for talk in talks(4)])
    assert kept_in(engine) == 0


def test_a_turn_that_is_aborted_goes_on_from_what_was_kept_before_it(tiny: PreTrainedModel, run: Run) -> None:
    engine = EmbeddedEngine(tiny, ())
    talk = stopped(engine, run)
    request = endless(talk.told((50, 51)))
    engine.submit([request])
    for _ in range(5):
        engine.step()
    snapshot = engine.snapshot()
    (aborted,) = engine.abort()
    kept = len(talk.prompt) + len(talk.said) - 1
    assert aborted.kept_tokens == kept
    expected = run(EmbeddedEngine(tiny, ()), [request])["a"]
    before = engine.stats()
    engine.submit(snapshot)
    output = run(engine, [])["a"]
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert engine.stats().kept_tokens - before.kept_tokens == kept
    assert engine.stats().reprefilled_tokens - before.reprefilled_tokens == 1 + 2 + 5 - 1


def test_sleep_and_another_policy_forget_and_the_base_is_always_live(tiny: PreTrainedModel, run: Run) -> None:
    engine = EmbeddedEngine(tiny, ())
    talk = stopped(engine, run)
    assert engine.sleep() == []
    assert again_in(engine, run, talk) == 0
    engine.set_policy(random_policy(tiny, 1))
    talk = stopped(engine, run)
    engine.set_policy(random_policy(tiny, 2))
    assert kept_in(engine) == 0
    of_base = stopped(engine, run, version=BASE_VERSION)
    engine.set_policy(random_policy(tiny, 3))
    assert again_in(engine, run, of_base) > 0
    assert again_in(engine, run, replace(of_base, version=None)) == 0


def test_a_version_that_stays_live_keeps_its_conversations(tiny: PreTrainedModel, run: Run) -> None:
    engine, alone = EmbeddedEngine(tiny, ()), EmbeddedEngine(tiny, ())
    for one in (engine, alone):
        one.set_policy(random_policy(tiny, 1))
    talk = stopped(engine, run, version=1)
    holder = replace(endless(talk), request_id="holder", version=1)
    engine.submit([holder])
    engine.step()
    engine.set_policy(random_policy(tiny, 2))
    engine.submit([talk.told((50, 51)).request(False)])
    outputs = run(engine, [])
    expected = run(alone, [talk.told((50, 51)).request(False)])["a"]
    assert outputs["a"].kept_tokens == len(talk.prompt) + len(talk.said) - 1
    assert outputs["a"].token_ids == expected.token_ids
    assert engine.stats().live_versions == (2,)
    assert kept_in(engine) == 0


def test_policies_that_share_an_engine_keep_their_own(tiny: PreTrainedModel, run: Run) -> None:
    below = EmbeddedEngine(tiny, (), max_versions=versions_needed(2))
    shared = SharedEngine(below, members=2)
    first, second = shared.member("first"), shared.member("second")
    first.set_policy(random_policy(tiny, 1))
    second.set_policy(random_policy(tiny, 2))
    alone = EmbeddedEngine(tiny, ())
    alone.set_policy(random_policy(tiny, 1))
    assert_alike(play(first, run, True, talks(5)), play(alone, run, False, talks(5)))
    mine, theirs = first.stats(), second.stats()
    assert mine.kept_tokens == below.stats().kept_tokens > 0
    assert mine.reprefilled_tokens == below.stats().reprefilled_tokens
    assert (theirs.kept_tokens, theirs.reprefilled_tokens) == (0, 0)


# The store itself


POLICY = DecodePolicy(1, [], is_base=False)


def keep(store: KeptStore, *token_ids: int) -> None:
    store.add(POLICY, token_ids, torch.zeros(2, 1, len(token_ids) - 1, 4))


def found(store: KeptStore, *token_ids: int) -> int:
    kept = store.find(POLICY, token_ids)
    return 0 if kept is None else kept.computed


def test_who_was_used_least_recently_goes_first() -> None:
    store = KeptStore(most_tokens=8)
    keep(store, 1, 2, 3, 4)
    keep(store, 5, 6, 7, 8)
    assert found(store, 1, 2, 3, 4, 9) == 3
    keep(store, 9, 8, 7, 6)
    assert store.tokens == 6
    assert [found(store, *ids, 0) for ids in ((1, 2, 3, 4), (5, 6, 7, 8), (9, 8, 7, 6))] == [3, 0, 3]
    keep(store, *range(20))
    assert store.tokens == 6


def test_the_longest_beginning_is_found_and_nothing_that_is_not_one() -> None:
    store = KeptStore(most_tokens=100)
    keep(store, 1, 2)
    keep(store, 1, 3, 5)
    assert found(store, 1, 3, 5) == 0
    assert found(store, 1, 3, 5, 7) == 2
    assert found(store, 1, 2, 5, 7) == 1
    assert found(store, 1, 4, 5, 7) == found(store, 257, 2, 5) == 0
    assert store.find(DecodePolicy(1, [], is_base=False), (1, 2, 5, 7)) is None


def test_a_conversation_replaces_what_it_continues_once_nobody_else_stands_there() -> None:
    store = KeptStore(most_tokens=100)
    keep(store, 1, 2, 3)
    keep(store, 1, 2, 3)
    keep(store, 1, 2, 3, 7, 8)
    assert (found(store, 1, 2, 3, 9), store.tokens) == (2, 6)
    keep(store, 1, 2, 3, 9, 9)
    assert (found(store, 1, 2, 3, 4), store.tokens) == (0, 8)
