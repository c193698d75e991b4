"""Gantt chart of a plan: the tasks of each node over time, as text or as a picture (Pillow).

swarmnode pipeline plan FILE --out PLAN.json; python benchmarks/pipeline_gantt.py PLAN.json [--png FILE.png]
"""

import argparse
import shutil
from collections.abc import Iterator
from io import BytesIO
from itertools import count
from pathlib import Path

import msgspec
from rich.cells import set_cell_size

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import ScheduledWork, Timeline, simulate
from swarmnode.machine.installing import how_to_install

IDLE = "."
LETTERS = {"forward": "F", "loss": "L", "backward": "B"}
LABEL_WIDTH = 20
"""Columns of the row label: stage, node and the beginning of its name."""
SHARE_WIDTH = 5
"""Columns of a terminal row for the utilisation at its end."""
MIN_COLUMNS = 20
NARROWEST, WIDEST = 80, 120
"""Columns of the text chart; where there is no terminal, as many as it would have."""

COLOURS = {"forward": "#4c78a8", "loss": "#e45756", "backward": "#f2a541"}
PLOT_WIDTH, ROW_HEIGHT, BAR_HEIGHT, MARGIN = 1200, 22, 16, 12
"""Pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Gantt chart of a plan of `swarmnode pipeline plan --out`")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--png", type=Path, help="draw to this file instead of the terminal")
    options = parser.parse_args()
    plan = msgspec.json.decode(options.plan.read_bytes(), type=Plan)
    if options.png is not None:
        options.png.write_bytes(png_chart(plan, simulate(plan)))
    else:
        width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
        print(text_chart(plan, simulate(plan), width))


def text_chart(plan: Plan, timeline: Timeline, width: int = 100) -> str:
    """Returns a chart with one row per node, at most `width` characters wide, a time axis and a legend.

    A column shows what fills most of it, and is idle where less than half of it is filled. A loss, which may
    be shorter than that, is always shown.

    >>> link = ((0.0, 1.0), (1.0, 0.0))
    >>> small = Instance(("a", "b"), (1.0, 1.0), link, (1, 1), ((0,), (1,)), path_length=2, waves=1)
    >>> plan = Plan(small, paths=((0, 1),))
    >>> "FFFF" in text_chart(plan, simulate(plan), 80)
    True
    """
    columns = max(width - LABEL_WIDTH - SHARE_WIDTH - 2, MIN_COLUMNS)
    column_s = timeline.makespan_s / columns
    filled: dict[int, list[dict[str, float]]] = {
        node: [{} for _ in range(columns)] for node in range(plan.instance.node_count)
    }
    losses: set[tuple[int, int]] = set()
    for bar in timeline.tasks:
        _fill(filled[bar.node], bar, column_s)
        if bar.kind == "loss":
            losses.add((bar.node, min(int((bar.start_s + bar.end_s) / 2 / column_s), columns - 1)))
    lines: list[str] = []
    for node in plan.instance.by_stage():
        cells = (
            LETTERS["loss"] if (node, at) in losses else _letter(column, column_s)
            for at, column in enumerate(filled[node])
        )
        label = set_cell_size(node_label(plan.instance, node), LABEL_WIDTH)
        lines.append(f"{label}|{''.join(cells)}|{timeline.utilisation[node]:{SHARE_WIDTH}.0%}")
    lines += [" " * LABEL_WIDTH + line for line in _axis(timeline.makespan_s, columns)]
    legend = "  ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    lines.append(f"{legend}  {IDLE} idle   time in s, {column_s:.2g} s a column")
    return "\n".join(lines)


def png_chart(plan: Plan, timeline: Timeline) -> bytes:
    """Returns the chart as a PNG file. Raises ConfigError if Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        hint = f"{how_to_install('plot')}, or leave out --png"
        raise ConfigError("Pillow is not installed, which draws the PNG", hint=hint) from error
    order = plan.instance.by_stage()
    font = ImageFont.load_default()
    # Pillow's own font is Latin-1 where it comes without FreeType.
    names = {n: node_label(plan.instance, n).encode("latin-1", "replace").decode("latin-1") for n in order}
    left = MARGIN * 2 + int(max(font.getlength(name) for name in names.values()))
    top = MARGIN * 2 + ROW_HEIGHT
    bottom = top + ROW_HEIGHT * len(order)
    image = Image.new("RGB", (left + PLOT_WIDTH + 5 * MARGIN, bottom + ROW_HEIGHT + MARGIN), "white")
    draw = ImageDraw.Draw(image)
    per_s = PLOT_WIDTH / timeline.makespan_s
    for tick_s in ticks(timeline.makespan_s, PLOT_WIDTH // 80):
        x = left + tick_s * per_s
        draw.line((x, top, x, bottom + 4), fill="#dddddd")
        draw.text((x, bottom + 6), f"{tick_s:g} s", fill="black", font=font)
    for row, node in enumerate(order):
        y = top + row * ROW_HEIGHT
        draw.text((MARGIN, y + 3), names[node], fill="black", font=font)
        draw.text(
            (left + PLOT_WIDTH + 6, y + 3), f"{timeline.utilisation[node]:.0%}", fill="black", font=font
        )
        if row and plan.instance.stage_of[node] != plan.instance.stage_of[order[row - 1]]:
            draw.line((MARGIN, y - 1, left + PLOT_WIDTH, y - 1), fill="#999999")
    rows = {node: row for row, node in enumerate(order)}
    for bar in timeline.tasks:
        y = top + rows[bar.node] * ROW_HEIGHT + (ROW_HEIGHT - BAR_HEIGHT) // 2
        box = (left + bar.start_s * per_s, y, left + bar.end_s * per_s, y + BAR_HEIGHT)
        draw.rectangle(box, fill=COLOURS[bar.kind], outline="white")
    x = float(left)
    for kind, colour in COLOURS.items():
        draw.rectangle((x, MARGIN, x + 12, MARGIN + 12), fill=colour)
        draw.text((x + 18, MARGIN), kind, fill="black", font=font)
        x += 100
    draw.text((x, MARGIN), f"{timeline.makespan_s:.2f} s", fill="black", font=font)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def node_label(instance: Instance, node: int) -> str:
    """Returns stage, index and name: `s0  12 Australia`. Characters that control a terminal are removed from
    the name."""
    stage = instance.stage_of[node]
    name = "".join(c for c in instance.names[node] if c.isprintable())
    return f"{'--' if stage < 0 else f's{stage}':3} {node:>3} {name}"


def ticks(makespan_s: float, most: int) -> list[float]:
    """Returns round times from zero, 1, 2 or 5 times a power of ten apart: at most `most` and the zero."""
    steps_s = (digit * 10.0**power for power in count(-9) for digit in (1, 2, 5))
    step_s = next(step_s for step_s in steps_s if makespan_s / step_s <= most)
    return [round(i * step_s, 9) for i in range(int(makespan_s / step_s) + 1)]


def _fill(columns: list[dict[str, float]], bar: ScheduledWork, column_s: float) -> None:
    """Add the seconds of a bar to the columns that it touches."""
    for at in range(int(bar.start_s / column_s), len(columns)):
        inside_s = min(bar.end_s, (at + 1) * column_s) - max(bar.start_s, at * column_s)
        if inside_s <= 0 and at * column_s >= bar.end_s:
            break
        columns[at][bar.kind] = columns[at].get(bar.kind, 0.0) + max(inside_s, 0.0)


def _letter(column: dict[str, float], column_s: float) -> str:
    if sum(column.values()) < column_s / 2:
        return IDLE
    return LETTERS[max(column, key=lambda kind: column[kind])]


def _axis(makespan_s: float, columns: int) -> Iterator[str]:
    """Yields a ruler, and the seconds under it."""
    ruler, numbers = ["-"] * (columns + 2), [" "] * (columns + 2 + SHARE_WIDTH)
    for tick_s in ticks(makespan_s, columns // 8):
        at = 1 + min(int(tick_s / makespan_s * columns), columns - 1)
        ruler[at] = "+"
        text = f"{tick_s:g}"
        if at + len(text) <= len(numbers):
            numbers[at : at + len(text)] = text
    yield "".join(ruler)
    yield "".join(numbers).rstrip()


if __name__ == "__main__":
    main()
