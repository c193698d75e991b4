"""The page of a real node: what it shows after some rounds, and that its buttons are followed."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.extensions.page.access import TOKEN_HEADER
from tests.joined_node import JoinedNode
from tests.warm_start import WarmStart

pytestmark = pytest.mark.slow
ALONE = ("--preset", "tiny", "--set", "exchange.enabled=false", "--set", "tasks.eval_examples=4")
TASK = """
def examples(seed):
    for number in range(40):
        yield f"letter {(seed + number) % 26}=", "a"

def reward(completions, **columns):
    return [len(text) % 3 / 2 for text in completions]
"""


@pytest.fixture
def node(tmp_path: Path, quick_model: Path, warm: WarmStart) -> Iterator[JoinedNode]:
    (tmp_path / "letters.py").write_text(TASK)
    task = ("--task", str(tmp_path / "letters.py"))
    one = JoinedNode(tmp_path / "home", "--model", str(quick_model), *ALONE, *task, warm=warm)
    yield one
    one.end()


def asked(node: JoinedNode, path: str, content: object = None, token: str = "") -> Any:
    """The answer of its page; the status where it refuses."""
    headers = {TOKEN_HEADER: token, "Content-Type": "application/json"}
    body = None if content is None else json.dumps(content).encode()
    url = f"http://127.0.0.1:{node.running().http_port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_after_three_rounds_the_page_shows_what_was_learnt_and_follows_its_buttons(node: JoinedNode) -> None:
    node.until_round(3)
    state = asked(node, "/state")
    token = state["token"]
    assert asked(node, "/control", {"request": "pause"}) == 403
    assert asked(node, "/control", {"request": "pause"}, token)["answer"].startswith("pausing")
    node.until(lambda: node.status()["phase"]["name"] == "paused")
    done = node.status()["progress"]["round"]

    rewards = asked(node, "/rewards")
    assert rewards["rounds"] == list(range(1, done + 1))
    assert all(isinstance(one, float) for one in rewards["own"]) and list(rewards["tasks"]) == ["letters"]
    assert rewards["held_out_rounds"][0] == 0

    rollouts = asked(node, "/rollouts?round=1")
    assert rollouts["rounds"] == list(range(1, done + 1)) and 0 < len(rollouts["rollouts"]) <= 4
    for one in rollouts["rollouts"]:
        assert one["author"] == "own" and one["task"] == "letters" and one["prompt"].startswith("letter ")
        assert len(one["tokens"]) == len(one["logprobs"]) == one["tokens_in_all"]
        # One that was cut may end in half a character, which no token shows; no text has special tokens.
        text = re.sub(r"<\|\w+\|>", "", "".join(one["tokens"]))
        assert text.startswith(one["completion"].rstrip("\ufffd"))
        assert sum(end - begin for _, begin, end, _ in one["spans"]) == one["tokens_in_all"]

    state = asked(node, "/state")
    assert state["verdicts"]["sampler"]["word"] == "sampler and trainer agree"
    assert state["verdicts"]["helping"]["word"] == "alone"
    assert state["status"]["reward"]["groups"] == 32 and state["control"]["paused"]
    origins = {one["key"]: one["origin"] for one in asked(node, "/settings")}
    assert origins["tasks.names"] == "command line" and origins["exchange.enabled"] == "--set"
    assert origins["training.learning_rate"] == "preset tiny" and origins["network.mdns"] == "default"
    assert f"the page of this node: http://127.0.0.1:{node.running().http_port}/" in node.story

    asked(node, "/control", {"request": "resume"}, token)
    node.until_round(done + 1)
    asked(node, "/control", {"request": "finish"}, token)
    summary = node.summary()
    assert summary["stopped"] == "stopped on request" and summary["saved_round"] == summary["rounds"] > done
