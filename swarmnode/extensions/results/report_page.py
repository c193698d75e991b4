"""The report of a run: one HTML file that needs no network and no script.

run_record.py -> verdicts, curves, peers, rollouts, settings in words -> [report_page] -> report_command.py
"""

import time
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from swarmnode.exchange.drop_reasons import in_words
from swarmnode.extensions.page.known_peers import known_peers
from swarmnode.extensions.page.verdicts import PageVerdict, helping, learning, pace, sampler, why_little
from swarmnode.extensions.results.html import Curve, Html, element, plot, table
from swarmnode.extensions.results.model_card import base_name
from swarmnode.extensions.results.run_record import RunRecord
from swarmnode.node.showing.figures import age
from swarmnode.node.showing.node_status import NodeStatus

TIMES = {"whole round": "round_s", "generating": "generate_s", "training": "train_s"}
SHOWN_ROUNDS = 3
"""Rounds that rollouts are shown of: the first, the newest, and those between."""
SAFETY = Html(
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
)
"""Nothing is loaded and nothing runs, whatever a stranger's text is."""


def report_page(record: RunRecord) -> str:
    """Returns the page."""
    status = record.status
    style = (files("swarmnode.extensions.results") / "report.css").read_text()
    title = f"{status.run}, round {status.progress.round}"
    named = element("title", f"{title}: swarmnode")
    head = element("head", SAFETY, named, Html(f"<style>{style}</style>"))
    main = element("main", *_parts(record, title))
    return f'<!doctype html>\n<html lang="en">{head}<body>{main}</body></html>\n'


def _parts(record: RunRecord, title: str) -> Iterator[Html]:
    status, history = record.status, record.history
    yield element("h1", title)
    yield element("p", _whose(record), class_="note")
    verdicts = {
        "Is it learning?": learning(status, history),
        "Who helps?": helping(status),
        "What is slow?": pace(status),
        "Sampler and trainer": sampler(status, history.rounds),
    }
    yield element(
        "div", *(_card(question, verdict) for question, verdict in verdicts.items()), class_="cards"
    )
    if why := why_little(status):
        yield element("h2", "What keeps it from learning")
        yield element("ul", *(element("li", one) for one in why))
    yield element("h2", "Reward")
    curves = history.curves()
    held_out = list(zip(curves["held_out_rounds"], curves["held_out"], strict=True))
    rewards: dict[str, Curve] = {
        "own answers": list(zip(curves["rounds"], curves["own"], strict=True)),
        "answers of others": list(zip(curves["rounds"], curves["external"], strict=True)),
        "held-out examples": held_out,
    }
    yield plot("Mean reward", {name: curve for name, curve in rewards.items() if _known(curve)})
    yield from _tasks(curves)
    yield element("h2", "Time of a round")
    times: dict[str, Curve] = {
        name: list(zip(curves["rounds"], curves["seconds"][key], strict=True))
        for name, key in TIMES.items()
        if key in curves["seconds"]
    }
    yield plot("Seconds", times)
    yield element("h2", "Learnt from others")
    yield from _peers(status)
    yield element("h2", "Rollouts")
    yield from _rollouts(record)
    yield element("h2", "Settings")
    rows = [(one["key"], one["value"], one["origin"]) for one in record.settings]
    changed = [row for row in rows if row[2] != "default"]
    heads = ("setting", "value", "from")
    yield table(heads, changed) if changed else element("p", "All are defaults.")
    yield element("details", element("summary", f"all {len(rows)} settings"), table(heads, rows))


def _whose(record: RunRecord) -> str:
    status = record.status
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(None if record.running else status.phase.since))
    limit = "" if status.progress.rounds_limit is None else f" of {status.progress.rounds_limit}"
    doing = f"running, {status.phase.name}" if record.running else "last round"
    swarm = f", swarm {status.swarm}" if status.swarm else ""
    tokens = f"{status.progress.tokens:,} tokens in {age(status.progress.seconds)}"
    return (
        f"{status.name} ({status.peer_id}){swarm}; model {base_name(status.model)};"
        f" round {status.progress.round}{limit}, {tokens}; {doing}, {at}"
    )


def _card(question: str, verdict: PageVerdict) -> Html:
    return element(
        "section",
        element("h3", question),
        element("p", verdict.word, class_=f"word {verdict.tone}"),
        element("p", verdict.text),
    )


def _known(curve: Curve) -> bool:
    return any(value is not None for _, value in curve)


def _tasks(curves: Mapping[str, Any]) -> Iterator[Html]:
    """Yields the table of tasks: the first and the newest reward of each."""
    own, held_out = curves["tasks"], curves["held_out_tasks"]
    names = sorted(own.keys() | held_out.keys())
    rows = [(name, *_ends(own.get(name, [])), *_ends(held_out.get(name, []))) for name in names]
    if rows:
        yield table(("task", "own, first", "own, newest", "held out, first", "held out, newest"), rows)


def _ends(values: list[float | None]) -> tuple[str, str]:
    known = [value for value in values if value is not None]
    return (f"{known[0]:.3f}", f"{known[-1]:.3f}") if known else ("-", "-")


def _peers(status: NodeStatus) -> Iterator[Html]:
    rows = [
        (
            *(one.name, str(one.gave), "-" if one.figures is None else str(one.figures.accepted)),
            *("-" if one.figures is None else str(one.figures.dropped), one.peer),
        )
        for one in known_peers(status)
    ]
    if rows:
        yield table(("peer", "groups learnt from", "accepted", "dropped", "peer id"), rows)
    yield element("p", f"Not used: {in_words(status.exchange.dropped)}.")


def _rollouts(record: RunRecord) -> Iterator[Html]:
    rounds: list[int] = record.rollouts.at()["rounds"]
    if not rounds:
        yield element("p", "None are kept.")
        return
    steps = [round(part * (len(rounds) - 1) / (SHOWN_ROUNDS - 1)) for part in range(SHOWN_ROUNDS)]
    for number in dict.fromkeys(rounds[step] for step in steps):
        shown = map(_rollout, record.rollouts.at(number)["rollouts"])
        yield element("details", element("summary", f"round {number}"), *shown)


def _rollout(rollout: Mapping[str, Any]) -> Html:
    reward = rollout.get("reward")
    told = "no reward" if reward is None else f"reward {reward:.3g}"
    by = "own" if rollout.get("author") == "own" else f"of {rollout.get('author_name')}"
    return element(
        "article",
        element("p", f"{rollout.get('task')}, {by}, {told}", class_="note"),
        element("pre", str(rollout.get("prompt", ""))),
        element("pre", str(rollout.get("completion", "")), class_="answer"),
    )
