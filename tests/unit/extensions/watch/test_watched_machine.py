"""Machines are asked side by side: one that is dead, slow, endless or strange holds up nobody."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.extensions.page.access import asks_for_us
from swarmnode.extensions.watch.watch_command import table
from swarmnode.extensions.watch.watched_machine import (
    Seen,
    WatchedMachine,
    ask,
    page_at,
    watched,
)
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.building.page_client import MOST_BYTES, PageAddress
from swarmnode.node.showing.node_status import Phase, WeekContribution
from tests.shown_page import STATUS, shown_page


@contextmanager
def answering(write: Callable[[socket.socket], None]) -> Iterator[PageAddress]:
    """Something that listens and answers whatever it likes, once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                try:
                    write(connection)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield PageAddress("127.0.0.1", listener.getsockname()[1])
        thread.join()


def picture(*machines: tuple[str, Seen], width: int = 140) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(table(machines, 1012.0))
    return captured.get()


def test_a_home_is_asked_with_its_token_and_an_address_with_its_password(tmp_path: Path) -> None:
    with shown_page(lambda: STATUS, node={"http_password": "correct horse"}) as page:
        note = RunningNode(1, "peer", "127.0.0.1", page.port, (), page.token)
        write_running(resolve_paths(tmp_path).running, note)
        home = watched(str(tmp_path), "", 60)
        home.look()
        assert (home.seen.statuses, home.seen.problem) == ((STATUS,), "")
        assert ask(page_at(f"127.0.0.1:{page.port}", "correct horse")) == STATUS
        assert ask(page_at(f"http://me:correct%20horse@127.0.0.1:{page.port}/")) == STATUS
        with pytest.raises(SwarmnodeError, match="wrong password"):
            ask(page_at(f"127.0.0.1:{page.port}", "wrong horse"))


def test_what_was_seen_last_stays_when_a_machine_goes_away(tmp_path: Path) -> None:
    with shown_page(lambda: STATUS) as page:
        machine = watched(f"127.0.0.1:{page.port}", "", 60)
        machine.look()
    machine.look()
    assert machine.seen.statuses == (STATUS,) and "no answer" in machine.seen.problem
    alone = watched(str(tmp_path), "", 60)
    alone.look()
    assert alone.seen.problem == "no node is running here"
    write_running(resolve_paths(tmp_path).running, RunningNode(os.getpid(), "peer", "127.0.0.1", 0))
    alone.look()
    assert alone.seen.problem == "its page is off (node.page)"


def test_a_machine_that_hangs_holds_up_no_other() -> None:
    released = threading.Event()

    def hang() -> list[PageAddress]:
        released.wait()
        return []

    with shown_page(lambda: STATUS) as page:
        machines = [WatchedMachine("dead", hang, 60), watched(f"127.0.0.1:{page.port}", "", 60)]
        for machine in machines:
            machine.start()
        assert machines[1].asked.wait(30) and machines[1].seen.statuses
        assert not machines[0].asked.is_set()
        for machine in machines:
            machine.end()
    released.set()


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(2 * MOST_BYTES // 2**16):
        connection.sendall(b"x" * 2**16)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (endless, "too long"),
        (
            lambda it: it.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
            "not a node, or one of another",
        ),
        (
            lambda it: it.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"),
            "answered with status 302",
        ),
        (
            lambda it: it.sendall(b"HTTP/1.1 421 Misdirected Request\r\nContent-Length: 0\r\n\r\n"),
            "its IP address or its own host name",
        ),
        (lambda it: it.sendall(b"\xff" * 99), "no answer"),
        (lambda it: it.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), "not a node, or"),
        (lambda it: it.sendall(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 999), "no answer"),
    ],
    ids=["endless", "other", "elsewhere", "other name", "garbage", "cut", "headers"],
)
def test_whatever_answers_is_bounded_and_no_fault_of_ours(
    write: Callable[[socket.socket], None], problem: str
) -> None:
    with answering(write) as page, pytest.raises(SwarmnodeError, match=problem):
        ask(page)


@pytest.mark.parametrize("word", ["nowhere", "ftp://a:1", "http://", "a:b", "http://[::1", ":80", "a:99999"])
def test_what_is_no_machine_is_said_at_once(word: str) -> None:
    with pytest.raises(ConfigError, match="neither the home"):
        page_at(word)


def test_the_word_that_is_no_machine_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"otter\.lan:x is neither") as caught:
        page_at("http://any:secret@otter.lan:x")
    assert "secret" not in str(caught.value)


def test_a_host_that_cannot_be_asked_is_said_to_be_one() -> None:
    with pytest.raises(SwarmnodeError, match="no answer"):
        ask(PageAddress("ot ter", 80))


def test_two_nodes_behind_one_address_have_two_names() -> None:
    names = [watched(f"https://any:secret@otter.lan/{node}/", "", 1.0).name for node in ("a", "b")]
    assert names == ["otter.lan:443/a", "otter.lan:443/b"]


def test_homes_that_begin_alike_are_told_apart_on_a_narrow_screen() -> None:
    homes = [(f"/home/otter/swarmnode-{one}", Seen((STATUS,), 1000.0)) for one in "AB"]
    text = picture(*homes, width=80)
    assert "A" in text and "B" in text and "\u2026" not in text


def test_words_stay_whole_on_a_narrow_screen() -> None:
    week = WeekContribution(31.4, 4.2)
    coming = replace(STATUS, phase=Phase("coming back to the pipeline", 900.0), week=week)
    text = picture(
        ("h/A", Seen((replace(STATUS, week=week),), 1000.0)),
        ("/home/otter/swarmnode-2", Seen((coming,), 1000.0)),
        width=80,
    )
    assert {"calm-blue-otter", "generating", "pipeline", "peers", "week", "kWh"} <= set(text.split())


def test_the_table_shows_what_each_does_and_what_is_wrong_with_which() -> None:
    fine = Seen((replace(STATUS, week=WeekContribution(31.4, 4.2)),), 1000.0)
    text = picture(("attic", fine), ("cellar", Seen((STATUS,), 1000.0, "no answer")), ("new", Seen()))
    attic = next(line for line in text.splitlines() if line.strip().startswith("attic"))
    assert attic.split() == [
        "attic", "calm-blue-otter", "generating", "12", "s", "12/60", "0.250", "0.200", "900", "2",
        "31.4", "h,", "4.2", "kWh",
    ]  # fmt: skip
    assert "cellar: no answer (heard 12 s ago)" in text and "asking" in text


def test_words_of_others_steer_no_terminal() -> None:
    nasty = replace(STATUS, name="\x1b[2Jotter [red]", advice="\x07do\nthis")
    text = picture(("\x1b]0;title\x07", Seen((nasty,), 1000.0)))
    assert not {"\x1b", "\x07"} & set(text) and "[red]" in text


def test_a_status_from_the_future_is_shown_all_the_same() -> None:
    assert "0 s" in picture(("ahead", Seen((STATUS,), time.time() + 1e6, "no answer")))


def test_the_example_of_the_docs_names_a_machine_as_its_page_wants_to_be_asked() -> None:
    text = (Path(__file__).parents[4] / "docs" / "watch.md").read_text()
    found = re.findall(r"\w[\w.]*:8080", text)
    assert found and all(asks_for_us(host, "0.0.0.0", "otter") for host in found)
