"""Who lies in which band, and that keys and values go with their sequence."""

import pytest
import torch

from swarmnode.rollout.decode.slots import NARROWEST_ON_CPU, Band, Slots, cache_size
from swarmnode.rollout.decode.weights import Shape

CPU = torch.device("cpu")
SHAPE = Shape(layers=1, heads=1, kv_heads=1, head_dim=2, hidden=2, intermediate=2, vocab=5, norm_eps=1e-6)
LONGEST = 4 * NARROWEST_ON_CPU


def keys_of(marks: list[float], columns: int) -> torch.Tensor:
    """A cache that holds one number for each sequence."""
    cache = torch.empty(cache_size(SHAPE, len(marks), columns))
    return cache.copy_(torch.tensor(marks)[:, None, None, None])


def first_keys(band: Band) -> list[float]:
    return band.tables(1)[0][:, 0, 0].tolist()


def placed(lengths: list[int]) -> Slots:
    """Slots in which row i has `lengths[i]` tokens, and i as every number of its keys and values."""
    slots = Slots(SHAPE, 8, LONGEST, torch.float32, CPU)
    rows = slots.claim(len(lengths))
    slots.place(rows, lengths, keys_of([float(row) for row in rows], max(lengths)), rows)
    return slots


def sample(slots: Slots, steps: int) -> None:
    for _ in range(steps):
        slots.append(torch.zeros(slots.rows, dtype=torch.int64), torch.zeros(slots.rows))
        slots.make_room()


def test_who_leaves_is_replaced_by_the_last() -> None:
    band = Band(SHAPE, 8, 6, torch.float32, CPU)
    band.add([10, 11, 12, 13, 14], [0] * 5, keys_of([0, 1, 2, 3, 4], 3))
    band.remove([13, 10])
    assert band.rows == [14, 11, 12]
    assert first_keys(band) == [4, 1, 2]
    band.add([15], [0], keys_of([5], 8))
    assert first_keys(band) == [4, 1, 2, 5]


def test_sequences_start_in_the_narrowest_band_that_is_roomy_for_them() -> None:
    slots = placed([3, NARROWEST_ON_CPU - 1, LONGEST, 3])
    assert [(band.width, band.rows) for band in slots.bands] == [
        (NARROWEST_ON_CPU, [0, 3]),
        (2 * NARROWEST_ON_CPU, [1]),
        (LONGEST, [2]),
    ]


def test_who_outgrows_a_band_takes_the_nearly_full_along() -> None:
    longest = NARROWEST_ON_CPU * 3 // 4
    slots = placed([longest, longest - 5, 2])
    sample(slots, NARROWEST_ON_CPU - longest)
    assert [band.rows for band in slots.bands] == [[0, 1, 2]]
    sample(slots, 1)
    assert [(band.width, band.rows) for band in slots.bands] == [
        (NARROWEST_ON_CPU, [2]),
        (2 * NARROWEST_ON_CPU, [0, 1]),
    ]
    assert [first_keys(band) for band in slots.bands] == [[2], [0, 1]]
    assert slots.rows_in_order == slots.order.tolist() == [2, 0, 1]
    assert slots.positions().tolist() == [slots.tick - 1 + length for length in (2, longest, longest - 5)]


def test_who_has_grown_to_full_length_holds_one_table_and_no_emptied_ones() -> None:
    slots = placed([3] * 8)
    sample(slots, LONGEST - 3)
    assert [band.cache.shape[1] * band.width for band in slots._bands] == [0, 0, 8 * LONGEST]
    slots.release(range(8))
    assert slots._bands[-1].cache.shape[1] == 8, "fresh memory on a CPU is dear: the last table stays"


def test_keys_stay_where_they_are_when_rows_close_up() -> None:
    slots = placed([3, 3, LONGEST // 2, 3])
    sample(slots, 2)
    slots.release([1, 0])
    before = [table.data_ptr() for band in slots.bands for table in band.lines]
    assert slots.close_up() == [2, 3]
    assert [(band.rows, first_keys(band)) for band in slots.bands] == [([1], [3]), ([0], [2])]
    assert [table.data_ptr() for band in slots.bands for table in band.lines] == before


def test_a_stream_of_sequences_does_not_read_much_more_than_it_has() -> None:
    """One old sequence among young ones must not make them all as dear as itself."""
    slots = placed([20] * 8)
    read = needed = 0
    for step in range(4 * LONGEST):
        sample(slots, 1)
        lengths = (slots.positions() + 1).tolist()
        needed += sum(lengths)
        read += sum(len(band.rows) * band.longest(slots.tick) for band in slots.bands)
        # Row 0 lives long, the others as many steps as their number times ten.
        over = [row for row in slots.rows_in_order if step % (10 * row if row else LONGEST - 30) == 0]
        if step and over:
            slots.release(over)
            rows = slots.claim(len(over))
            slots.place(rows, [20] * len(rows), keys_of([0.0], 20), [0] * len(rows))
    assert read < 1.4 * needed


@pytest.mark.parametrize("steps", [10, 500])
def test_lines_of_the_history_are_dropped_when_nobody_needs_them(steps: int) -> None:
    slots = placed([4, 4])
    for tick in range(1, steps + 1):
        slots.append(torch.tensor([tick, -tick]), torch.tensor([float(tick), 0.0]))
        if tick % 20 == 0:
            assert slots.harvest([1, 0], tick - 19)[0] == [
                [-t for t in range(tick - 19, tick + 1)],
                list(range(tick - 19, tick + 1)),
            ]
            slots.release([0, 1])
            slots.place(slots.claim(2), [4, 4], keys_of([0.0], 4), [0, 0])
    assert len(slots._history._tokens) == 64
