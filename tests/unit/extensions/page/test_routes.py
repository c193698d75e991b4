"""Every route of the page, by Starlette's client."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.testclient import TestClient

from swarmnode.extensions.page.access import HEADERS, TOKEN_HEADER, AccessGuard
from swarmnode.extensions.page.routes import STATE_FOR_S, application
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.monitors import append_line
from swarmnode.node.showing.node_status import ConnectedPeer, Network, Phase
from tests.shown_page import STATUS, page_source

TOKEN = "the token of this start"
MARKUP = "<img src=x onerror=alert(1)>\x1b[2J\u202e</script>"


class Page:
    """A page with its files in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.status = STATUS
        self.stopped = 0
        self.control = RunControl(self._stop)
        self.rollouts = folder / "rollouts.jsonl"
        paths = resolve_paths(folder)
        self.logs = paths.logs
        source = page_source(lambda: self.status, control=self.control, paths=paths, rollouts=self.rollouts)
        guard = AccessGuard(
            application(source, TOKEN),
            bound="127.0.0.1",
            own_name="otter",
            password="",
            token=TOKEN,
        )
        self.client = TestClient(guard, base_url="http://127.0.0.1:8080")

    def _stop(self) -> None:
        self.stopped += 1

    def json(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        return answer.json()

    def ask(self, content: object, token: str = TOKEN) -> int:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.client.post("/control", content=body, headers={TOKEN_HEADER: token}).status_code

    def keep(self, round: int, **more: object) -> None:
        append_line(self.rollouts, {"round": round, "author": "own", "task": "t", "tokens": [], **more})


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


PATHS = ("/", "/page.js", "/page.css", "/icon.svg", "/healthz", "/status", "/metrics", "/state", "/rewards")


@pytest.mark.parametrize("path", [*PATHS, "/rollouts", "/settings", "/no-such-page"])
def test_every_answer_says_that_nothing_of_others_is_loaded(page: Page, path: str) -> None:
    answer = page.client.get(path)
    assert answer.status_code == (404 if path == "/no-such-page" else 200)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_page_has_no_script_or_style_within_and_names_no_other_site(page: Page) -> None:
    html = page.client.get("/").text
    assert "<script src=" in html and "<style" not in html and "style=" not in html
    assert "onclick" not in html and "javascript:" not in html
    for path in ("/", "/page.js", "/page.css"):
        text = page.client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "@import" not in text
    script = page.client.get("/page.js").text
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", 'setTimeout("'):
        assert dangerous not in script


def test_the_state_has_verdicts_peers_and_the_token(page: Page) -> None:
    network = Network("up", 1.0, peers=1, connected=(ConnectedPeer("12D3KooWother", "lan"),))
    page.status = replace(STATUS, network=network)
    state = page.json("/state")
    assert state["token"] == TOKEN
    assert set(state["verdicts"]) == {"learning", "helping", "pace", "sampler"}
    (peer,) = state["peers"]
    assert (peer["peer"], peer["connected"], peer["gave"]) == ("12D3KooWother", "lan", 2)
    assert peer["name"].count("-") >= 1
    assert state["control"] == {
        "takes": ["pause", "resume", "finish", "stop"], "paused": False, "until": "", "ending": False
    }  # fmt: skip


def test_many_who_look_on_are_told_one_state_until_it_is_old_or_a_button_was_pressed(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    first = page.json("/state")
    page.status = replace(STATUS, name="renamed")
    assert [page.json("/state") for _ in range(20)] == [first] * 20
    now += STATE_FOR_S
    assert page.json("/state")["status"]["name"] == "renamed"
    assert page.ask({"request": "pause"}) == 200
    assert page.json("/state")["control"]["paused"]


def test_what_strangers_wrote_comes_out_as_json_text(page: Page) -> None:
    page.status = replace(STATUS, name=MARKUP, advice=MARKUP, phase=Phase("generating", 0.0, MARKUP))
    page.keep(1, author=MARKUP, completion=MARKUP, prompt=MARKUP)
    for path in ("/state", "/rollouts"):
        answer = page.client.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "\x1b" not in answer.text
    assert page.json("/rollouts")["rollouts"][0]["completion"] == MARKUP
    assert page.json("/state")["status"]["name"] == "<img src=x onerror=alert(1)>\\x1b[2J\\u202e</script>"


def test_rollouts_are_found_by_round_and_the_newest_without_one(page: Page) -> None:
    assert page.json("/rollouts") == {"round": None, "rounds": [], "rollouts": []}
    for number in (1, 3, 5):
        page.keep(number, reward=number / 10)
    assert page.json("/rollouts")["round"] == 5
    found = page.json("/rollouts?round=4")
    assert (found["round"], found["rounds"]) == (3, [1, 3, 5])
    assert [one["reward"] for one in found["rollouts"]] == [0.3]
    assert page.json("/rollouts?round=0")["round"] == 1
    for odd in ("-1", "x", "1e9", "9" * 40, "%00"):
        assert page.client.get(f"/rollouts?round={odd}").status_code == 400


def test_curves_are_those_of_this_run(page: Page) -> None:
    for number in (1, 2):
        line = {
            "event": "round", "peer": STATUS.peer_id, "run": "", "progress.round": number,
            "reward.own": number / 4, "reward.own_tasks.rev": 0.5,
        }  # fmt: skip
        append_line(page.logs / "metrics.jsonl", line)
        append_line(page.logs / "metrics.jsonl", {**line, "run": "another", "reward.own": 9.0})
    found = page.json("/rewards")
    assert (found["rounds"], found["own"], found["tasks"]) == ([1, 2], [0.25, 0.5], {"rev": [0.5, 0.5]})


def test_settings_have_an_origin_and_a_sentence(page: Page) -> None:
    found = {one["key"]: one for one in page.json("/settings")}
    assert found["node.http"]["value"] == "127.0.0.1" and found["node.http"]["origin"] == "default"
    assert "Address that the page listens on" in found["node.http"]["meaning"]


def test_a_node_is_paused_resumed_and_ended(page: Page) -> None:
    assert page.ask({"request": "pause"}) == 200 and page.control.paused
    assert page.json("/state")["control"]["until"] == "until resumed"
    assert page.ask({"request": "resume"}) == 200 and not page.control.paused
    assert page.ask({"request": "pause", "for_s": 7200}) == 200
    assert page.control.until.startswith("until ") and page.control.paused
    assert page.ask({"request": "finish"}) == 200 and page.control.ending and not page.stopped
    assert page.ask({"request": "stop"}) == 200 and page.stopped == 1


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"request": "format"}', b'{"request": "pause", "for_s": -1}',
        b'{"request": "pause", "for_s": 1e300}', b'{"request": "pause", "for_s": NaN}',
        b'{"request": "stop", "more": 1}', b'{"request": "pause", "for_s": "1"}', b"[" * 1000,
    ],
)  # fmt: skip
def test_an_odd_request_is_refused_and_changes_nothing(page: Page, content: bytes) -> None:
    assert page.ask(content) == 400
    assert not (page.control.paused or page.control.ending or page.stopped)


def test_a_request_without_the_token_changes_nothing(page: Page) -> None:
    assert page.ask({"request": "stop"}, token="guessed") == 403
    assert page.client.post("/control", json={"request": "stop"}).status_code == 403
    assert page.client.get("/control").status_code == 405
    assert page.client.post("/state", headers={TOKEN_HEADER: TOKEN}).status_code == 405
    assert page.stopped == 0


def test_a_node_that_cannot_pause_says_so(page: Page) -> None:
    page.control.takes = ("stop",)
    answer = page.client.post("/control", json={"request": "pause"}, headers={TOKEN_HEADER: TOKEN})
    assert (answer.status_code, answer.text) == (400, "this node takes stop, not pause\n")
