"""The live panel of a local swarm: what each node knew, learns from the others, and how far it is.

metrics.jsonl of each node -> swarm_story.py -> [SwarmPanel] -> rich

The nodes are processes of their own and write their metrics anyway; nobody is asked. What they tell passes
below. Before and after the nodes run, lines are printed as they are.
"""

import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarmnode.node.showing.live_panel import LOG_LINES, InPlace
from swarmnode.node.showing.swarm_story import NodeStory, StoryReader, curves_of
from swarmnode.printable import printable

REDRAW_S = 0.5
CURVE_ROOM = 12
"""Columns of each curve: eighty are enough for the whole table."""


class SwarmPanel:
    """`say` takes what is to be told, `watch` shows nodes as long as they run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._screen: InPlace | None = None

    def say(self, line: str) -> None:
        if self._screen is None:
            self._console.print(Text(printable(line)))
        else:
            self._lines.append(line)

    @contextmanager
    def watch(self, title: str, metrics: Mapping[str, Path]) -> Generator[None, None, None]:
        """Draw the nodes with these metrics, by name, until the end of the block."""
        readers = {name: StoryReader(path) for name, path in metrics.items()}
        over = threading.Event()

        def draw() -> None:
            stories = {name: reader.read() for name, reader in readers.items()}
            screen.draw(lambda _width, _height: render_swarm(title, stories, tuple(self._lines)))

        def keep_drawing() -> None:
            while not over.wait(REDRAW_S):
                draw()

        self._lines.clear()
        screen = self._screen = InPlace(self._console)
        drawing = threading.Thread(target=keep_drawing, name="swarm-panel", daemon=True)
        drawing.start()
        try:
            yield
        finally:
            over.set()
            drawing.join()
            self._lines.clear()
            draw()
            screen.close()
            self._screen = None


def render_swarm(title: str, stories: Mapping[str, NodeStory], lines: Sequence[str]) -> RenderableType:
    """The nodes for one moment. A task that a node learnt stands there with its held-out reward."""
    table = Table(box=None, padding=(0, 1), header_style="bold", expand=True)
    for column in ("node", "knew", "round", "reward", "held out", "answers of others"):
        table.add_column(column, no_wrap=True)
    gains: list[RenderableType] = []
    curves = curves_of([story.rewards for story in stories.values()], CURVE_ROOM)
    for (name, story), curve in zip(stories.items(), curves, strict=True):
        cells = (
            _short(name),
            ", ".join(story.knew) or "-",
            str(story.round),
            curve,
            "-" if story.held_out is None else f"{story.held_out:.2f}",
            _of_others(story),
        )
        table.add_row(*map(Text, cells))
        if learnt := ", ".join(f"{task} {now:.2f}" for task, (_, now) in story.learnt.items()):
            gains.append(Text(f" {_short(name)} learnt {learnt}"))
    told = [Text(printable(line), style="dim", overflow="ellipsis", no_wrap=True) for line in lines]
    parts = [table, *([Text(), *gains] if gains else []), *([Text(), *told] if told else [])]
    return Panel(Group(*parts), title=Text(title), border_style="green")


def _short(name: str) -> str:
    """The animal of a node's name.

    >>> _short("calm-blue-otter")
    'otter'
    """
    return name.split("-")[-1]


def _of_others(story: NodeStory) -> str:
    """Their right answers that it holds, and whether they go its way."""
    if story.agreement is None:
        return str(story.replayed_from_others)
    return f"{story.replayed_from_others} ({story.agreement:+.2f})"
