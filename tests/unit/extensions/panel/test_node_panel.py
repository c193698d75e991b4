"""The picture of a node on terminals of different sizes."""

import html
import re
import time
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from swarmnode.exchange.drop_reasons import Reason, in_words
from swarmnode.exchange.exchange_stats import HealthStats, HelpStats, NodesOf, ReceiptStats
from swarmnode.extensions.panel.live_panel import room_below
from swarmnode.extensions.panel.node_panel import NodePanel, rows_that_fit
from swarmnode.network.reach import Reach
from swarmnode.node.learner import Generation
from swarmnode.node.showing.node_status import (
    LibraryStatus,
    Network,
    NodeStatus,
    PipelineStatus,
    Saved,
    Sharing,
    WeekContribution,
    invitation,
    measurements,
)
from swarmnode.training.records import TrainReport
from tests.shown_page import STATUS

ADDRESS = "/ip4/192.168.178.201/tcp/41234/p2p/12D3KooWpzf3HmX1A7QeTpr8yYtUeK7QXkYqRkQn9uNzFrJx1v2Q"
BUSY = replace(
    STATUS,
    generation=Generation(engine="embedded", mode="refill", groups_in_flight=12),
    network=Network("up", 1000.0, 0, "", 12, (ADDRESS,)),
    exchange=Sharing(
        published=1234,
        served=33,
        headers=1234,
        fetched=444,
        accepted=222,
        buffered=16,
        dropped={"stale": 100},
    ),
)
STORY = [
    f"12:00:0{second} round {second} and more than fits into a line of eighty columns" for second in range(6)
]
ALL_LABELS = (
    "doing", "policy", "round", "reward", "held out", "trained on", "speed", "rollouts", "network",
    "exchange", "dropped", "kept back", "saved",
)  # fmt: skip


def drawn(status: NodeStatus, width: int, height: int | None) -> list[str]:
    """The lines of the panel, and not one is longer than the terminal."""
    console = Console(width=width, height=height or 60, record=True, file=StringIO())
    console.print(NodePanel(status, [0.1, 0.5] * 30, STORY, 1075.0, height))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def terminal(width: int, height: int) -> Console:
    return Console(
        width=width,
        height=height,
        file=StringIO(),
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )


def test_at_80_by_24_every_row_is_there_below_the_command_and_nothing_is_cut() -> None:
    room = room_below(terminal(80, 24), str(invitation(BUSY)))
    lines = drawn(BUSY, 80, room)
    assert len(lines) <= room == 21
    text = "\n".join(lines)
    assert [label for label in ALL_LABELS if f" {label}  " not in text] == []
    rows = lines[: next(number for number, line in enumerate(lines) if "12:00" in line)]
    assert not any("…" in line for line in rows)
    assert "waiting 16" in text and "round 5" in text


@pytest.mark.parametrize("height", [20, 16, 12, 9, 7])
@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_a_smaller_terminal_loses_the_least_important_rows_first(width: int, height: int) -> None:
    lines = drawn(BUSY, width, height)
    assert len(lines) <= height
    text = "\n".join(lines)
    assert all(f" {label}  " in text for label in ("doing", "round", "reward"))
    assert lines[-1].startswith("╰"), "the frame is closed"


def test_the_picture_of_the_readme_is_of_a_panel_that_speaks_in_words() -> None:
    picture = html.unescape((Path(__file__).parents[4] / "docs" / "panel.svg").read_text())
    said = "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture)).replace("\xa0", " ")
    assert "announced" in said
    assert [code for code in Reason if "_" in code and code in said] == []
    assert not re.search(r"\bJ \d|\bpublished\b|\bpaced\b", said)


def test_without_a_bound_everything_is_drawn_as_in_the_picture_of_the_readme() -> None:
    text = "\n".join(drawn(BUSY, 140, None))
    assert all(label in text for label in (*ALL_LABELS, "join us"))
    assert all(f"round {second}" in text for second in range(6))


def test_an_operator_reads_words_and_no_codes() -> None:
    codes = {"stale": 100, "crowded_out": 219, "zero_advantage": 3}
    heard = replace(BUSY.exchange, dropped=codes, unpublished={"paced": 41})
    text = "\n".join(drawn(replace(BUSY, exchange=heard), 140, None))
    assert "219 not needed, newer ones took their place, 100 too old to train on, 3 equal rewards" in text
    assert "41 more than others would accept" in text
    assert [code for code in (*codes, "paced", "J 16", "published") if code in text] == []


def test_every_reason_is_said_without_an_underscore() -> None:
    said = in_words(dict.fromkeys(map(str, Reason), 1))
    assert "_" not in re.sub(r"\(rollout\.\w+\)", "", said), "but in a setting's name"


def test_what_nobody_could_hear_is_not_shown_as_if_somebody_had() -> None:
    alone = replace(BUSY, network=Network("up", 1000.0))
    assert "announced 1234 (to nobody" in "\n".join(drawn(alone, 140, None))
    assert "nobody" not in "\n".join(drawn(BUSY, 140, None))


def test_the_frame_says_where_the_status_page_is_and_the_panel_what_helps() -> None:
    said = "no answer to last was right in 20 rounds"
    lines = drawn(replace(BUSY, page="http://127.0.0.1:8123/status", advice=said), 80, 21)
    assert "http://127.0.0.1:8123/status" in lines[-1]
    assert said in "\n".join(lines)


def test_rows_are_given_up_one_after_the_other() -> None:
    lines_of = {"doing": 1, "saved": 3, "dropped": 1}
    assert rows_that_fit({**lines_of, "join us": 2}, 5, None) == ({**lines_of, "join us": 2}, 5)
    assert rows_that_fit({**lines_of, "join us": 2}, 5, 13) == (lines_of, 5)
    assert rows_that_fit(lines_of, 5, 11) == (lines_of, 3), "the log gives way first"
    assert rows_that_fit(lines_of, 5, 10) == ({"doing": 1, "saved": 3}, 3)
    assert rows_that_fit(lines_of, 5, 9) == ({"doing": 1}, 5), "what is gone leaves room"
    assert rows_that_fit(lines_of, 5, 1) == ({"doing": 1}, 0), "what always stays is drawn anyway"


def test_advice_has_its_lines_before_the_log_has_its_own() -> None:
    said = (
        "the reward of every answer is the same, so there is nothing to learn from; look at the answers with"
    )
    said += " `swarmnode task try last.py`, and let the reward tell more of them apart"
    text = " ".join(" ".join(line.strip("│ ") for line in drawn(replace(BUSY, advice=said), 80, 14)).split())
    assert said in text
    assert rows_that_fit({"doing": 1, "advice": 3, "saved": 1}, 5, 7) == (
        {"doing": 1, "advice": 3, "saved": 1}, 0
    )  # fmt: skip


def test_advice_for_many_tasks_is_cut_where_the_terminal_ends() -> None:
    said = "; ".join(f"no answer to task {number} was right in 20 rounds of 256" for number in range(20))
    lines = drawn(replace(BUSY, advice=said), 80, 21)
    assert len(lines) == 21 and "no answer to task 0" in "".join(lines)


def test_the_panel_says_what_was_learnt_from_libraries() -> None:
    assert "library" not in "\n".join(drawn(BUSY, 120, None))
    kept = replace(BUSY, library=LibraryStatus(kept=40))
    assert "40 groups kept for others" in "\n".join(drawn(kept, 120, None))
    learnt = LibraryStatus(kept=40, lenders=4, answers=612, catching_up=True, rounds=11, rounds_worth=35.2)
    text = "\n".join(drawn(replace(BUSY, library=learnt), 120, None))
    assert "catching up, round 12: 612 right answers from 4 peers, worth 35 rounds of our own; 40" in text
    over = replace(learnt, catching_up=False, rounds_worth=None)
    assert "learnt: 612 right answers from 4 peers; 40" in "\n".join(
        drawn(replace(BUSY, library=over), 120, None)
    )


def test_the_panel_says_what_was_asked_for_and_what_was_done_for_others() -> None:
    assert "asked others" not in "\n".join(drawn(BUSY, 120, None))
    stats = HelpStats(asked=3, heard=7, answered=4, tried=2)
    said = "asked others 3 times, was asked 7 times: 4 groups announced again and 2 examples tried for them"
    assert said in "\n".join(drawn(replace(BUSY, help=stats), 140, None))


@pytest.mark.parametrize(
    ("teaching", "waiting", "words"),
    [(3, 2, "; 3 authors teach, 2 wait"), (1, 1, "; 1 author teaches, 1 waits")],
)
def test_the_panel_says_who_teaches_and_who_waits(teaching: int, waiting: int, words: str) -> None:
    training = TrainReport(book=9, replayed=4, own_groups=8, teaching=teaching, waiting=waiting)
    assert words in " ".join(" ".join(drawn(replace(BUSY, training=training), 200, None)).split())
    nobody = replace(training, teaching=0, waiting=0)
    assert "teach" not in "\n".join(drawn(replace(BUSY, training=nobody), 200, None))


def test_the_panel_says_what_was_given_and_who_said_thanks() -> None:
    assert not {"given", "thanked"} & set(" ".join(drawn(BUSY, 120, None)).split())
    week, thanks = WeekContribution(31.4, 4.2, 412, 220, 9), ReceiptStats(groups=412, nodes=9)
    text = "\n".join(drawn(replace(BUSY, week=week, receipts=thanks), 120, None))
    assert "this week: 31 h, 4.2 kWh, 412 groups given, learnt from by 9 nodes, 220 learnt from" in text
    assert "9 nodes learnt from our groups, 412 times in all" in text
    once = replace(BUSY, week=WeekContribution(0.5), receipts=ReceiptStats(groups=1, nodes=1))
    text = "\n".join(drawn(once, 120, None))
    assert "this week: 0.5 h, 0 groups given, 0 learnt from" in text
    assert "1 node learnt from our groups, once in all" in text


def test_a_crowd_with_nasty_names_has_few_words_in_the_panel_and_none_in_the_metrics() -> None:
    assert "headers/s" not in "\n".join(drawn(BUSY, 120, None))
    names = tuple(NodesOf(f"\x1b[2J{number}", 9 - number) for number in range(8))
    health = HealthStats(
        nodes=11, reached=8, out_of_reach=2, headers_per_s=12.34, different_tasks=8, tasks=names
    )
    status = replace(BUSY, health=health)
    text = " ".join("\n".join(drawn(status, 160, None)).split())
    assert "11 other nodes heard, 8 of 10 reachable, 12.3 headers/s; on \\x1b[2J0 (9)" in text
    assert "and 4 more" in text and "\\x1b[2J4" not in text
    found = measurements(status)
    assert found["health.nodes"] == 11 and not any("\x1b" in name for name in found)


def test_the_panel_shows_what_a_person_asks_for() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(NodePanel(STATUS, [0.1, 0.2, 0.3], ["12:00:00 hello"], now=1075.0))
    text = console.export_text()
    for expected in (
        "calm-blue-otter",
        "generating for 1 min 15 s",
        "12/60",
        "own 0.250",
        "external -",
        "5 own + 2 external groups",
        "900 tokens/s",
        "2 peers, up",
        "restarted 1 times",
        "4 bad signature",
        "round 10, 1 min 15 s ago",
        "hello",
        "swarmnode join /ip4/127.0.0.1/tcp/1/p2p/12D3KooWexample",
    ):
        assert expected in text, expected


def test_markup_in_a_name_or_a_reason_is_text_and_not_style() -> None:
    odd = replace(STATUS, model="[red]m[/]", network=replace(STATUS.network, detail="[bold]down[/nope]"))
    console = Console(width=140, record=True, file=StringIO())
    console.print(NodePanel(odd, [], [], now=1000.0))
    assert "[red]m[/]" in console.export_text()


STRANGERS = (
    "ready\x1b[2J\x1b]0;owned\x07\r\n12:00:00 all is well\u202e\x9b31m [red]x[/] [link=http://evil]y[/link]"
)


def texts_replaced(tree: object, text: str) -> object:
    if isinstance(tree, str):
        return text
    if isinstance(tree, dict):
        return {key: texts_replaced(value, text) for key, value in tree.items()}
    return [texts_replaced(value, text) for value in tree] if isinstance(tree, list) else tree


def written(renderable: RenderableType) -> str:
    """The very characters that a terminal would get, escape codes of ours among them."""
    stream = StringIO()
    Console(width=200, file=stream, force_terminal=True, color_system=None).print(renderable)
    return stream.getvalue()


def test_whatever_text_a_status_holds_the_panel_writes_no_control_character_of_it() -> None:
    everything = texts_replaced(msgspec.to_builtins(STATUS, builtin_types=()), STRANGERS)
    odd = msgspec.convert(everything, NodeStatus)
    odd = replace(odd, exchange=Sharing(dropped={STRANGERS: 1}, unpublished={STRANGERS: 1}))
    shown = written(NodePanel(odd, [], [STRANGERS], 1000.0))
    for forbidden in ("\x1b[2J", "\x1b]", "\x07", "\r", "\x9b", "\u202e", "\x1b[3", "\n12:00:00"):
        assert forbidden not in shown, ascii(forbidden)
    assert "[red]x[/]" in shown and "[link=http://evil]y[/link]" in shown


def test_the_time_that_a_plan_expects_is_told_from_the_one_an_iteration_took() -> None:
    part = PipelineStatus(
        name="attic", stage=1, stages=3, first_layer=2, end_layer=4, iteration=690, planned_s=6.256
    )
    told = written(NodePanel(replace(STATUS, pipeline=part), [], [], 1000.0))
    assert "iteration 690, planned 6.26 s;" in " ".join(told.split())
    told = written(NodePanel(replace(STATUS, pipeline=replace(part, iteration_s=0.06)), [], [], 1000.0))
    assert "iteration 690 took 0.06 s, planned 6.26 s;" in " ".join(told.split())


def test_restarts_for_memory_are_told() -> None:
    network = replace(STATUS.network, memory_restarts=3)
    told = written(NodePanel(replace(STATUS, network=network), [], [], 1000.0))
    assert "replaced 3 times for its memory use" in told


def test_a_failed_checkpoint_is_shown_in_place_of_its_age() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(NodePanel(replace(STATUS, checkpoint=Saved(error="the disk is full")), [], [], time.time()))
    assert "the disk is full" in console.export_text()


def test_the_panel_says_who_can_reach_the_node_and_who_can_join_it() -> None:
    at_home = replace(STATUS.network, addresses=("/ip4/192.168.1.20/tcp/4001",))
    assert "on this LAN: swarmnode join" in written(
        NodePanel(replace(STATUS, network=at_home), (), (), 1000.0)
    )
    nobody = Reach("nobody", "nobody can reach you", ("forward a port", "join a seed"))
    told = written(NodePanel(replace(STATUS, network=replace(at_home, reach=nobody)), (), (), 1000.0))
    assert "nobody can reach you: (1) forward a port, (2) join a seed" in " ".join(told.split())


def test_what_a_seed_shows_is_what_it_does_and_nothing_of_a_policy() -> None:
    text = "\n".join(drawn(replace(STATUS, learns=False), 80, None))
    assert all(label in text for label in ("doing", "swarm", "network", "passed on", "join us"))
    nothing = ("policy", "round", "reward", "held out", "trained on", "speed", "rollouts", "saved")
    assert not any(f" {label}  " in text for label in nothing)
