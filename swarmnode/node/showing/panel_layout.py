"""The layout of the panel on a terminal of a given size: the whole of it, or what matters most.

panel.py (rows and how many lines each takes) -> [fit_rows] -> panel.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

FRAME_LINES = 2
"""The border above and below."""
LEAST_STORY = 3
"""Lines of the log that stay until rows have to go."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Which rows are shown, and how."""

    rows: tuple[str, ...]
    one_line: frozenset[str]
    """Rows that are cut at the end of their line instead of going on in the next."""
    story: int
    """Lines of the log."""


def fit_rows(
    lines_of: Mapping[str, int],
    first_to_go: Sequence[str],
    story: int,
    height: int | None,
    cut_last: Sequence[str] = (),
) -> RowLayout:
    """Chooses as many rows as fit into `height` lines (None: no bound), the frame included. `lines_of`: lines
    that each row takes when nothing is cut, in the order they are shown; rows not in `first_to_go` always
    stay. `cut_last`: rows that keep all of their lines before any line of the log.

    >>> fit_rows({"doing": 1, "dropped": 3, "join us": 2}, ["join us", "dropped"], story=6, height=8)
    RowLayout(rows=('doing', 'dropped'), one_line=frozenset({'dropped'}), story=3)
    """
    layout = RowLayout(tuple(lines_of), frozenset(), story)
    if height is None:
        return layout
    for step in _steps(lines_of, first_to_go, story, cut_last):
        if _lines(layout, lines_of) <= height:
            break
        layout = _narrowed(layout, step)
    return layout


def _steps(
    lines_of: Mapping[str, int], first_to_go: Sequence[str], story: int, cut_last: Sequence[str]
) -> list[tuple[str, str]]:
    """Returns the cuts in order: nothing that is gone is missed more than what goes later."""
    present = [row for row in first_to_go if row in lines_of]
    whole = [row for row in cut_last if lines_of.get(row, 0) > 1]
    others = [row for row in reversed(tuple(lines_of)) if row not in (*present, *whole)]
    least = [("story", "")] * min(story, LEAST_STORY)
    return [
        *(("drop", row) for row in present[:1]),
        *[("story", "")] * max(story - LEAST_STORY, 0),
        *(("cut", row) for row in (*present[1:], *others) if lines_of[row] > 1),
        *(least if whole else ()),
        *(("drop", row) for row in present[1:]),
        *(() if whole else least),
        *(("cut", row) for row in whole),
    ]


def _narrowed(layout: RowLayout, step: tuple[str, str]) -> RowLayout:
    match step:
        case ("drop", row):
            return replace(layout, rows=tuple(other for other in layout.rows if other != row))
        case ("cut", row):
            return replace(layout, one_line=layout.one_line | {row})
        case _:
            return replace(layout, story=layout.story - 1)


def _lines(layout: RowLayout, lines_of: Mapping[str, int]) -> int:
    rows = sum(1 if row in layout.one_line else lines_of[row] for row in layout.rows)
    # An empty line stands between the rows and the story.
    return FRAME_LINES + rows + (1 + layout.story if layout.story else 0)
