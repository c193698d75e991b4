import sys
from collections import Counter
from dataclasses import replace
from io import BytesIO

import pytest

from benchmarks.pipeline_gantt import COLOURS, png_chart, text_chart, ticks
from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import simulate
from swarmnode.machine.installing import how_to_install

LINK = ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0))
PAIR = Instance(("ann", "bob", "eve"), (1.0,) * 3, LINK, (1,) * 3, ((0,), (1,)), path_length=2, waves=1)
"""Forward 1 s, loss 0.25 s, backward 1.5 s, hop 1 s: an iteration of 9.25 s. Eve is in no stage."""

PLAN = Plan(PAIR, ((0, 1),))
COLUMNS = 37
"""A quarter of a second each."""
WIDTH = COLUMNS + 27


def rows(text: str) -> dict[str, str]:
    """By the name in the label: what is drawn between the bars."""
    return {line.split("|")[0].split()[-1]: line.split("|")[1] for line in text.splitlines() if "|" in line}


def test_each_node_shows_what_it_does_when() -> None:
    drawn = rows(text_chart(PLAN, simulate(PLAN), WIDTH))
    assert drawn == {
        "ann": "FFFF" + "." * 12 + "L" + "." * 14 + "BBBBBB",
        "bob": "." * 8 + "FFFF" + "." * 9 + "BBBBBB" + "." * 10,
        "eve": "." * COLUMNS,
    }


def test_a_column_that_is_mostly_idle_shows_idle_and_a_loss_shows_always() -> None:
    drawn = rows(text_chart(PLAN, simulate(PLAN), 47))
    assert len(drawn["ann"]) == 20
    assert drawn["ann"].count("L") == 1
    assert drawn["bob"].count("F") == 2
    assert drawn["bob"].startswith("....FF.")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_asked(width: int) -> None:
    lines = text_chart(PLAN, simulate(PLAN), width).splitlines()
    assert max(map(len, lines)) == width
    assert len({line.index("|") for line in lines if "|" in line}) == 1


def test_the_axis_counts_the_seconds() -> None:
    ruler, numbers = text_chart(PLAN, simulate(PLAN), WIDTH).splitlines()[3:5]
    for second in (0, 5):
        at = numbers.index(str(second))
        assert at == 21 + 4 * second
        assert ruler[at] == "+"


def test_ticks_are_round_and_few() -> None:
    assert ticks(9.25, 4) == [0, 5]
    assert ticks(9.25, 5) == [0, 2, 4, 6, 8]
    assert ticks(69.0, 7) == [0, 10, 20, 30, 40, 50, 60]
    assert ticks(0.002, 4) == [0, 0.0005, 0.001, 0.0015, 0.002]


def test_a_name_cannot_command_the_terminal_or_break_the_rows() -> None:
    names = ("\x1b[2Jann\n", "b" * 50, "\u6771\u4eac")
    text = text_chart(Plan(replace(PAIR, names=names), PLAN.paths), simulate(PLAN), WIDTH)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 6
    assert [len(line.split("|")[1]) for line in text.splitlines() if "|" in line] == [COLUMNS] * 3


def test_the_picture_shows_seconds_as_pixels() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.open(BytesIO(png_chart(PLAN, simulate(PLAN))))
    data = image.convert("RGB").tobytes()
    pixels = Counter(data[at : at + 3].hex() for at in range(0, len(data), 3))
    seconds = {kind: pixels[colour[1:]] / 1200 / 15 * 9.25 for kind, colour in COLOURS.items()}
    # The legend adds a little; the frame of a bar takes a little.
    assert seconds["forward"] == pytest.approx(2.0, rel=0.1)
    assert seconds["backward"] == pytest.approx(3.0, rel=0.1)
    assert seconds["loss"] == pytest.approx(0.25, rel=0.4)


def test_without_pillow_the_picture_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="Pillow") as error:
        png_chart(PLAN, simulate(PLAN))
    assert how_to_install("plot") in error.value.hint
