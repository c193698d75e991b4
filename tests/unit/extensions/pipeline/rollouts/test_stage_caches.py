"""Sequences that pass the stages token by token get what the whole model computes at once."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.rollouts.stage_caches import (
    GROWTH_COLUMNS,
    MAX_SESSIONS_PER_OWNER,
    Segments,
    StageCaches,
    last_rows,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from tests.unit.extensions.pipeline.stages.test_stage_model import stages_of
from tests.unit.extensions.pipeline.tiny_models import LAYERS, VOCABULARY, tiny_model

ROOM = 1 << 24
KEY = ("engine", 1)
WINDOWED = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "windows in half of the layers": ("qwen2", WINDOWED),
}


def mistral() -> Any:
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=4, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


class Stages:
    """A model cut behind some layers, each stage with its caches."""

    def __init__(self, model: Any, ends: Sequence[int], max_bytes: int = ROOM) -> None:
        self.stages = stages_of(model, ends)
        self.caches = [StageCaches(stage, max_bytes=max_bytes) for stage in self.stages]

    @torch.no_grad()
    def logits(
        self, segments: Segments, ids: Sequence[int], key: tuple[str, int] = KEY, *, all_tokens: bool = False
    ) -> Tensor:
        """Of the last tokens, or of all."""
        hidden_ND = self.stages[0].embed(torch.tensor([ids]))[0]
        for caches in self.caches:
            hidden_ND = caches.run(key, segments, hidden_ND)
        wanted_ND = hidden_ND if all_tokens else last_rows(hidden_ND, segments)
        return self.stages[0].head(self.stages[0].final_norm(wanted_ND))


@torch.no_grad()
def whole(model: Any, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def prompt(cell: int, count: int) -> Segments:
    return Segments((cell,), (0,), (count,))


def token(cell: int, start: int) -> Segments:
    return Segments((cell,), (start,), (1,))


def sentences(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("ends", [[LAYERS], [2, LAYERS], [1, 4, LAYERS]], ids=["one", "two", "three"])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_any_lengths_in_any_pieces_are_those_of_the_whole_model(
    name: str, ends: list[int]
) -> None:
    family, settings = MODELS[name]
    model = tiny_model(family, **settings)
    check_in_pieces(model, Stages(model, ends))


def test_a_family_that_has_one_window_for_all_layers_keeps_it() -> None:
    model = mistral()
    check_in_pieces(model, Stages(model, [2, LAYERS]))


def check_in_pieces(model: Any, stages: Stages) -> None:
    """Sequences that join late, bring some tokens at a time, and stand in cells in no order."""
    rng = random.Random(3)
    texts, cells = sentences(3, 9, 14, 11), [2, 0, 5, 1]
    found: list[list[Tensor]] = [[] for _ in texts]
    fed = [0] * len(texts)
    step = 0
    while any(done < len(text) for done, text in zip(fed, texts, strict=True)):
        rows = [row for row in range(4) if fed[row] < len(texts[row]) and step >= 2 * row]
        counts = [min(rng.choice((1, 1, 2, 5)), len(texts[row]) - fed[row]) for row in rows]
        segments = Segments(tuple(cells[row] for row in rows), tuple(fed[row] for row in rows), tuple(counts))
        step += 1
        if not rows:
            continue
        ids = [
            token
            for row, n in zip(rows, counts, strict=True)
            for token in texts[row][fed[row] : fed[row] + n]
        ]
        parts = stages.logits(segments, ids, all_tokens=True).split(counts)
        for row, n, part in zip(rows, counts, parts, strict=True):
            found[row].append(part)
            fed[row] += n
    for text, parts in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole(model, text), atol=1e-5, rtol=0)


def test_a_fork_goes_on_from_a_copy_and_leaves_the_lender_alone() -> None:
    model = tiny_model()
    stages = Stages(model, [2, LAYERS])
    (text,) = sentences(6)
    stages.logits(prompt(0, 6), text)
    segments = Segments((0, 3), (6, 5), (1, 1), forks=((0, 3, 5),))
    one, other = stages.logits(segments, [7, 9])
    torch.testing.assert_close(one, whole(model, [*text, 7])[-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(other, whole(model, [*text[:5], 9])[-1], atol=1e-5, rtol=0)


def test_a_cell_is_used_again_from_its_first_column() -> None:
    model = tiny_model()
    stages = Stages(model, [2, LAYERS])
    long, short = sentences(12, 4)
    stages.logits(prompt(0, 12), long)
    stages.logits(prompt(0, 4), short)
    with pytest.raises(Rejected, match="does not reach"):
        stages.logits(token(0, 12), [5])
    found = stages.logits(token(0, 4), [5])
    torch.testing.assert_close(found[0], whole(model, [*short, 5])[-1], atol=1e-5, rtol=0)


def test_a_step_that_is_brought_twice_changes_nothing() -> None:
    stages = Stages(tiny_model(), [2, LAYERS])
    (text,) = sentences(6)
    stages.logits(prompt(0, 6), text)
    once, again = stages.logits(token(0, 6), [8]), stages.logits(token(0, 6), [8])
    assert torch.equal(once, again)


def test_cells_grow_beyond_what_they_were_made_with() -> None:
    model = tiny_model()
    stages = Stages(model, [LAYERS])
    (text,) = sentences(2 * GROWTH_COLUMNS + 5)
    stages.logits(prompt(0, 5), text[:5])
    stages.logits(prompt(4, 3), text[:3])
    rest = Segments((0,), (5,), (len(text) - 5,))
    torch.testing.assert_close(stages.logits(rest, text[5:])[0], whole(model, text)[-1], atol=1e-5, rtol=0)


def test_no_byte_is_allocated_beyond_the_limit_and_what_was_there_stays() -> None:
    model = tiny_model()
    stages = Stages(model, [LAYERS])
    limit = stages.caches[0].position_bytes * 2 * GROWTH_COLUMNS
    stages = Stages(model, [LAYERS], max_bytes=limit)
    (text,) = sentences(6)
    stages.logits(prompt(1, 6), text)
    assert stages.caches[0].used_bytes("engine") == limit
    for segments, key in ((prompt(2, 1), KEY), (prompt(0, 1), ("engine", 2))):
        with pytest.raises(Rejected) as caught:
            stages.logits(segments, [5], key=key)
        assert caught.value.reason == Refusal.NO_MEMORY
    assert (stages.caches[0].used_bytes("engine"), len(stages.caches[0])) == (limit, 1)
    found = stages.logits(token(1, 6), [5])
    torch.testing.assert_close(found[0], whole(model, [*text, 5])[-1], atol=1e-5, rtol=0)


def test_sessions_are_apart_and_an_owner_has_so_many() -> None:
    model = tiny_model()
    stages = Stages(model, [LAYERS])
    one, other = sentences(4, 5)
    stages.logits(prompt(0, 4), one, key=("engine", 1))
    stages.logits(prompt(0, 5), other, key=("other", 1))
    found = stages.logits(token(0, 4), [5], key=("engine", 1))
    torch.testing.assert_close(found[0], whole(model, [*one, 5])[-1], atol=1e-5, rtol=0)
    for number in range(2, MAX_SESSIONS_PER_OWNER + 1):
        stages.logits(prompt(0, 1), [5], key=("engine", number))
    with pytest.raises(Rejected, match="no_slot"):
        stages.logits(prompt(0, 1), [5], key=("engine", 0))
    stages.caches[0].close(("engine", 7))
    stages.logits(prompt(0, 1), [5], key=("engine", 0))


def test_each_owner_has_its_share_of_the_memory_and_who_is_none_has_nothing() -> None:
    (stage,) = stages_of(tiny_model(), [LAYERS])
    one_cell = StageCaches(stage, max_bytes=ROOM).position_bytes * GROWTH_COLUMNS
    caches = StageCaches(stage, max_bytes=2 * one_cell, owners=("engine", "other"))
    hidden_1D = torch.zeros(1, 32)
    caches.run(("engine", 1), prompt(0, 1), hidden_1D)
    for owner, reason in (("engine", Refusal.NO_MEMORY), ("stranger", Refusal.NOT_A_MEMBER)):
        with pytest.raises(Rejected) as caught:
            caches.run((owner, 2), prompt(0, 1), hidden_1D)
        assert caught.value.reason == reason
    caches.run(("other", 1), prompt(0, 1), hidden_1D)
    assert len(caches) == 2


def test_an_idle_session_makes_room() -> None:
    now_s = [0.0]
    (stage,) = stages_of(tiny_model(), [LAYERS])
    caches = StageCaches(stage, max_bytes=ROOM, idle_s=60, clock=lambda: now_s[0])
    hidden_1D = torch.zeros(1, 32)
    caches.run(("engine", 1), prompt(0, 1), hidden_1D)
    now_s[0] = 61.0
    caches.run(("engine", 2), prompt(0, 1), hidden_1D)
    assert len(caches) == 1
    with pytest.raises(Rejected) as caught:
        caches.run(("engine", 1), token(0, 1), hidden_1D)
    assert caught.value.reason == Refusal.UNKNOWN_WORK


BAD: dict[str, tuple[Any, ...]] = {
    "no sequence": ((), (), ()),
    "no token": ((0,), (0,), (0,)),
    "a cell twice": ((0, 0), (0, 0), (1, 1)),
    "without cells from the middle": ((), (3,), (1,)),
    "a fork into itself": ((0,), (0,), (1,), ((1, 1, 1),)),
}


@pytest.mark.parametrize("why", BAD)
def test_a_step_that_makes_no_sense_is_none(why: str) -> None:
    with pytest.raises(ValueError):
        Segments(*BAD[why])


def test_a_step_with_another_number_of_tokens_is_refused() -> None:
    (stage,) = stages_of(tiny_model(), [LAYERS])
    caches = StageCaches(stage, max_bytes=ROOM)
    with pytest.raises(Rejected) as caught:
        caches.run(KEY, prompt(0, 5), torch.zeros(1, 32))
    assert (caught.value.reason, len(caches)) == (Refusal.WRONG_SHAPE, 0)


def test_numbers_that_are_none_are_refused() -> None:
    (stage,) = stages_of(tiny_model(), [LAYERS])
    caches = StageCaches(stage, max_bytes=ROOM)
    with pytest.raises(Rejected, match="not_finite"):
        caches.run(KEY, prompt(0, 1), torch.full((1, 32), float("nan")))
