"""Formats figures for people, the same way in log, panel, page and commands."""

from collections.abc import Sequence

SPARKS = "▁▂▃▄▅▆▇█"


def figure(value: float | None, spec: str = ".3f") -> str:
    """Returns a number as text, `-` if it is unknown.

    >>> figure(None), figure(0.25)
    ('-', '0.250')
    """
    return "-" if value is None else format(value, spec)


def sparkline(values: Sequence[float]) -> str:
    """Returns a curve in characters, from the lowest to the highest value shown.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[int((value - low) * scale)] for value in values)


def age(seconds: float) -> str:
    """Returns a duration in words.

    >>> age(75), age(7300)
    ('1 min 15 s', '2 h 1 min')
    """
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
