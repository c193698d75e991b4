"""The curves of sapo.py as a picture: mean sampled reward by round, one panel a swarm, one line a rule.

Table -> [picture] -> SVG, by a few lines of our own
"""

from collections.abc import Sequence
from html import escape
from statistics import fmean

from sapo_plan import Outcome
from sapo_table import Table

COLOURS = ("#888888", "#bbbbbb", "#d9a441", "#4878a8", "#b05a7a", "#7a5ab0", "#2e8b57", "#a04030", "#303030")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 340, 220, 36, 30, 24, 24
SMOOTHED_ROUNDS = 5


def picture(table: Table) -> str:
    """All swarms side by side."""
    swarms = list(dict.fromkeys(swarm for swarm, _ in table.rows()))
    rules = list(dict.fromkeys(rule for _, rule in table.rows()))
    colours = {rule: COLOURS[number % len(COLOURS)] for number, rule in enumerate(rules)}
    panels = [
        _panel(table, swarm, colours, (LEFT + number * (WIDTH + GAP), TOP))
        for number, swarm in enumerate(swarms)
    ]
    foot = TOP + HEIGHT + BOTTOM + 18
    legend = [
        f'<text x="{LEFT + 110 * place}" y="{foot}" fill="{colours[rule]}">{escape(rule)}</text>'
        for place, rule in enumerate(rules)
    ]
    width = max(LEFT + len(swarms) * (WIDTH + GAP), LEFT + 110 * len(rules))
    height = TOP + HEIGHT + BOTTOM + 30
    style = "font-family:sans-serif;font-size:12px"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{style}">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *panels,
            *legend,
            "</svg>\n",
        ]
    )


def _panel(table: Table, swarm: str, colours: dict[str, str], at: tuple[int, int]) -> str:
    left, top = at
    curves = {
        rule: curve(list(table.tuned(swarm, rule).values()))
        for one, rule in table.rows()
        if one == swarm and table.tuned(swarm, rule)
    }
    longest = max((len(values) for values in curves.values()), default=1)
    parts = [f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(swarm)}</text>']
    for tenth in (0, 2, 4, 6, 8, 10):
        y = top + HEIGHT * (1 - tenth / 10)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:g}</text>')
    for rounds in (0, longest // 2, longest):
        x = left + WIDTH * rounds / longest
        parts.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 16}" text-anchor="middle">{rounds}</text>')
    for rule, values in curves.items():
        points = " ".join(
            f"{left + WIDTH * (number + 1) / longest:.1f},{top + HEIGHT * (1 - value):.1f}"
            for number, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[rule]}" stroke-width="2"/>')
    return "\n".join(parts)


def curve(outcomes: Sequence[Outcome]) -> list[float]:
    """Mean sampled reward over all nodes and seeds by round of their own, over the rounds just before it."""
    nodes = [rewards for outcome in outcomes for rewards in outcome.rewards]
    longest = max((len(rewards) for rewards in nodes), default=0)
    plain = [
        fmean(rewards[number] for rewards in nodes if number < len(rewards)) for number in range(longest)
    ]
    return [fmean(plain[max(0, number + 1 - SMOOTHED_ROUNDS) : number + 1]) for number in range(longest)]
