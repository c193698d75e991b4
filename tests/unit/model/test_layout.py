"""Which token attends to which, read off the slots of a layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.errors import ModelError
from swarmnode.model.layout import boxes_for, packed_layout

CPU = torch.device("cpu")
seeded = settings(deadline=None, derandomize=True, max_examples=40)
Groups = list[tuple[int, list[int]]]
groups_of_runs = st.lists(
    st.tuples(st.integers(1, 200), st.lists(st.integers(1, 100), max_size=6)), min_size=1, max_size=12
)


def whole_sequences(rows: list[Tensor], prompts: list[int | None]) -> list[Tensor]:
    """What each run continues to the end of it."""
    return [
        row if before is None else torch.cat([rows[before], row])
        for row, before in zip(rows, prompts, strict=True)
    ]


def runs_of(groups: Groups) -> tuple[list[int], list[int | None]]:
    lengths: list[int] = []
    prompts: list[int | None] = []
    for first, behind in groups:
        lengths += [first, *behind]
        prompts += [None, *[len(prompts)] * len(behind)]
    return lengths, prompts


@seeded
@given(groups_of_runs)
def test_every_run_asks_once_and_is_shown_its_whole_sequence(groups: Groups) -> None:
    lengths, prompts = runs_of(groups)
    layout = packed_layout(lengths, CPU, prompts)
    rows = list(torch.arange(sum(lengths)).split(lengths))
    whole = [row.tolist() for row in whole_sequences(rows, prompts)]
    seen: list[list[int]] = []
    queries, keys = layout.boxed.queries.token_of_slot_P, layout.boxed.keys.token_of_slot_P
    for box in layout.boxed.boxes:
        asking, queries = (
            queries[: box.rows * box.queries].view(box.rows, -1),
            queries[box.rows * box.queries :],
        )
        shown, keys = keys[: box.rows * box.keys].view(box.rows, -1), keys[box.rows * box.keys :]
        for own, sequence in zip(asking.tolist(), shown.tolist(), strict=True):
            run = next(n for n, row in enumerate(rows) if row[0] == own[0])
            assert own == [*rows[run].tolist(), *[rows[run][-1]] * (box.queries - lengths[run])]
            assert sequence == [*whole[run], *[whole[run][-1]] * (box.keys - len(whole[run]))]
            seen.append(whole[run])
    assert len(queries) == len(keys) == 0
    assert sorted(seen) == sorted(whole)
    assert layout.position_ids_1T[0].tolist() == [
        position for run, row in enumerate(whole) for position in range(len(row) - lengths[run], len(row))
    ]


@seeded
@given(groups_of_runs)
def test_every_slot_that_is_no_pad_gives_its_gradient_to_its_token_once(groups: Groups) -> None:
    lengths, prompts = runs_of(groups)
    layout = packed_layout(lengths, CPU, prompts)
    times = torch.tensor([1 + prompts.count(run) for run in range(len(lengths))])
    for slots, expected in [
        (layout.boxed.queries, torch.ones(sum(lengths))),
        (layout.boxed.keys, times.repeat_interleave(torch.tensor(lengths))),
        *([] if layout.keys is None else [(layout.keys, times.repeat_interleave(torch.tensor(lengths)))]),
    ]:
        tokens = slots.token_of_slot_P[slots.slot_of_token_T]
        assert tokens.tolist() == list(range(sum(lengths)))
        counted, used = torch.ones(sum(lengths)), [slots.slot_of_token_T]
        if slots.again is not None:
            again, of_tokens = slots.again
            assert torch.equal(slots.token_of_slot_P[again], of_tokens)
            counted.index_add_(0, of_tokens, torch.ones(len(again)))
            used.append(again)
        assert torch.equal(counted, expected.float())
        assert len(torch.cat(used).unique()) == sum(map(len, used)), "no slot twice"
    assert (layout.keys is None) == (times.max() == 1)


@seeded
@given(groups_of_runs)
def test_flash_kernels_get_the_runs_as_queries_and_whole_sequences_as_keys(groups: Groups) -> None:
    lengths, prompts = runs_of(groups)
    layout = packed_layout(lengths, CPU, prompts)
    row = torch.arange(sum(lengths))
    whole = whole_sequences(list(row.split(lengths)), prompts)
    keys = row if layout.keys is None else layout.keys.token_of_slot_P
    assert torch.equal(keys, torch.cat(whole))
    assert layout.query_ends.diff().tolist() == lengths
    assert layout.key_ends.diff().tolist() == [len(one) for one in whole]
    assert layout.longest_sequence == max(len(one) for one in whole)


@pytest.mark.parametrize("prompts", [[None, 1], [1, None], [None, -1], [None, 0, 1]])
def test_a_run_continues_only_one_that_stands_before_it_and_is_whole(prompts: list[int | None]) -> None:
    with pytest.raises(ModelError, match="cannot continue"):
        packed_layout([2] * len(prompts), CPU, prompts)


@seeded
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=80))
def test_boxes_hold_every_run_and_are_as_wide_as_they_must_be(pairs: list[tuple[int, int]]) -> None:
    shapes = sorted(((own, own + before) for own, before in pairs), key=lambda shape: (shape[1], shape[0]))
    start = 0
    for box in boxes_for(shapes):
        held = shapes[start : start + box.rows]
        assert (box.queries, box.keys) == tuple(map(max, zip(*held, strict=True)))
        start += box.rows
    assert start == len(shapes)


def test_equal_lengths_take_one_call_and_very_unequal_ones_several() -> None:
    assert len(boxes_for([(20, 20)] * 50)) == 1
    assert len(boxes_for([(20, 20)] * 50 + [(400, 400)] * 5)) == 2
    assert len(boxes_for([(20, 400)] * 55)) == 1
