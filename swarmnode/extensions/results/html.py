"""HTML of which no text can become markup, and curves as SVG.

report_page.py -> [element, plot] -> one file
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from swarmnode.printable import printable_lines

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 220, 48, 24, 8

MOST_LINES = 4000

Curve = Sequence[tuple[float, float | None]]
"""Points; None: unknown, where the line has a gap."""


class Html(str):
    """Markup. Any other text is escaped where it is put into some, and steers nothing."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: object) -> Html:
    """Returns an element.

    >>> element("p", "1 < 2 ", element("b", "so"), class_="note")
    '<p class="note">1 &lt; 2 <b>so</b></p>'
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items()
    )
    inner = "".join(one if isinstance(one, Html) else escape(_shown(one)) for one in content)
    return Html(f"<{name}{said}>{inner}</{name}>")


def _shown(text: str) -> str:
    return printable_lines(text, max_lines=MOST_LINES)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """Returns a table; a narrow screen scrolls it alone."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    return element(
        "div", element("table", element("thead", top), element("tbody", *body)), class_="wide", tabindex=0
    )


def plot(title: str, curves: Mapping[str, Curve]) -> Html:
    """Returns curves over rounds in one picture, each in a colour and dash of its own, named below it."""
    points = [(x, y) for curve in curves.values() for x, y in curve if y is not None]
    if not points:
        return element("p", f"{title}: nothing was measured yet", class_="note")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    first, last, low, high = min(xs), max(xs), min(0.0, *ys), max(ys)
    across, up = (last - first) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - first) / across * (WIDTH - LEFT - 8)
        return round(right, 1), round(HEIGHT - BOTTOM - (y - low) / up * (HEIGHT - BOTTOM - TOP), 1)

    drawn: list[str] = []
    for part in (0, 0.5, 1):
        _, y = place(first, low + part * up)
        drawn.append(element("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="grid"))
        drawn.append(element("text", f"{low + part * up:.3g}", x=LEFT - 6, y=y + 4, text_anchor="end"))
        x, _ = place(first + part * across, low)
        anchor = "end" if part == 1 else "middle" if part else "start"
        drawn.append(element("text", f"{first + part * across:.0f}", x=x, y=HEIGHT - 6, text_anchor=anchor))
    names: list[Html] = []
    for number, (name, curve) in enumerate(curves.items()):
        drawn += _line([None if y is None else place(x, y) for x, y in curve], number)
        key = element(
            "svg", element("line", x1=0, x2=24, y1=6, y2=6, class_=f"c{number}"), viewBox="0 0 24 12"
        )
        names.append(element("li", key, f" {name}"))
    picture = element("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    below = element("figcaption", f"{title}, over rounds", element("ul", *names))
    return element("figure", picture, below)


def _line(points: Sequence[tuple[float, float] | None], number: int) -> Iterator[Html]:
    for known, part in groupby(points, key=lambda one: one is not None):
        found = [one for one in part if one is not None]
        if known and len(found) == 1:
            yield element("circle", cx=found[0][0], cy=found[0][1], r=3, class_=f"c{number} dot")
        elif known:
            way = " ".join(f"{x},{y}" for x, y in found)
            yield element("polyline", points=way, class_=f"c{number}")
