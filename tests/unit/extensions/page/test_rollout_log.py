"""The rollouts that are kept of a run: which, how much of them, and for how long."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swarmnode.chat import Said, Turn, prompt_of
from swarmnode.extensions.page import rollout_log as module
from swarmnode.extensions.page.rollout_log import RolloutLog
from swarmnode.node.showing.kept_rollouts import FILE
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, Span, one_span


def spelt(token_ids: Sequence[int]) -> list[str]:
    return [f"<{token}>" for token in token_ids]


def answered(author: str, number: int, text: Said = "an answer") -> RolloutGroup:
    example = Example(ExampleKey("sums", "1", 0, number), f"{number} + 1 =\nThink.")
    completion = Completion(text, (1, 2), None, one_span(3, 2), "stop")
    scores = ({"correct": 1.0, "format*0.5": 0.5}, {"correct": 0.0, "format*0.5": None})
    return RolloutGroup(example, (completion, completion), scores, author, 3)


def kept_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_few_rollouts_of_each_round_are_kept_with_what_they_were_worth(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "run" / FILE, lambda group: [0.9, -0.9], 0, spelt)
    own, external = [answered("me", n) for n in range(20)], [answered("12D3KooWother", n) for n in range(2)]
    log.keep(7, own, external)
    kept = kept_in(tmp_path / "run" / FILE)
    assert [one["author"] for one in kept] == ["own"] * 4 + ["12D3KooWother"] * 2
    assert len({one["prompt"] for one in kept[:4]}) == 4
    for one in kept:
        right = one["rewards"]["correct"] == 1.0
        assert one["round"] == 7 and one["policy_version"] == 3 and one["task"] == "sums"
        assert (one["reward"], one["advantage"]) == ((1.25, 0.9) if right else (0.0, -0.9))
        assert one["prompt"].endswith("+ 1 =\nThink.") and one["completion"] == "an answer"


def test_the_text_of_strangers_is_kept_short_and_steers_no_terminal(
    tmp_path: Path,
) -> None:
    log = RolloutLog(tmp_path / "run" / FILE, lambda group: None, 0, spelt)
    odd = "one\ntwo\x1b[2J\u202e" + "\n" * 300 + "x" * 100_000
    log.keep(1, [], [answered("\x1b]0;owned\x07", 1, odd)])
    (one,) = kept_in(tmp_path / "run" / FILE)
    assert one["completion"].startswith("one\ntwo\\x1b[2J\\u202e\n")
    assert "more characters" in one["completion"] and len(one["completion"]) < 5000
    assert "\x1b" not in one["author"] and one["advantage"] is None


def test_rollouts_that_cannot_be_kept_stop_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    log = RolloutLog(tmp_path / "run" / FILE, lambda group: None, 0, spelt)
    for number in (1, 2):
        log.keep(number, [answered("me", 1)], [])
    assert caplog.text.count("no rollouts are kept") == 1


def log_in(folder: Path) -> RolloutLog:
    return RolloutLog(folder / FILE, lambda group: None, 0, spelt)


def test_each_token_is_kept_with_its_probability_and_its_policy_version(tmp_path: Path) -> None:
    spans = (Span(3, 0, 1), Span(4, 1, 3, "stale"))
    completion = Completion("abc", (7, 8, 9), (-0.1, -2.0, -0.00001), spans, "length", given=((1, 2),))
    group = RolloutGroup(Example(ExampleKey("t", "1", 0, 0), "p"), (completion,), ({"r": 1.0},), "me", 4)
    log_in(tmp_path).keep(1, [group], [])
    (one,) = kept_in(tmp_path / FILE)
    assert one["tokens"] == ["<7>", "<8>", "<9>"] and one["tokens_in_all"] == 3
    assert one["logprobs"] == [-0.1, -2.0, -0.0]
    assert one["spans"] == [[3, 0, 1, "fresh"], [4, 1, 3, "stale"]] and one["given"] == [[1, 2]]
    assert one["group_rewards"] == [1.0]


def test_a_conversation_is_kept_turn_by_turn(tmp_path: Path) -> None:
    prompt = prompt_of([{"role": "system", "content": "brief"}, {"role": "user", "content": "2+2"}])
    turns = (Turn("ask", ({"role": "tool", "content": "\x1b[2J4"},)), Turn("4"))
    group = answered("me", 1, turns)
    example = Example(group.example.key, prompt)
    group = RolloutGroup(example, group.completions, group.scores, group.author, group.policy_version)
    log_in(tmp_path).keep(1, [group], [])
    (one,) = kept_in(tmp_path / FILE)
    assert (one["prompt"], one["completion"]) == ("2+2 (before: system: brief)", "ask\n[tool] \\x1b[2J4\n4")
    assert one["messages"] == [["system", "brief"], ["user", "2+2"]]
    assert one["turns"] == [["ask", [["tool", "\\x1b[2J4"]]], ["4", []]]


def test_a_full_file_is_thinned_and_reaches_back_to_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ROLLOUTS", 20)
    log = log_in(tmp_path)
    for number in range(1, 101):
        log.keep(number, [answered("me", 1)], [])
    rounds = [one["round"] for one in kept_in(tmp_path / FILE)]
    assert len(rounds) <= 20 and rounds[0] == 1 and rounds[-3:] == [98, 99, 100]


def test_a_file_is_bounded_by_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    log = log_in(tmp_path)
    for number in range(1, 101):
        log.keep(number, [answered("me", 1, "x" * 1000)], [])
        assert (tmp_path / FILE).stat().st_size <= 20_000


def test_rounds_that_a_crash_undid_are_dropped_when_they_come_again(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for number in range(1, 6):
        log.keep(number, [answered("me", 1)], [])
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"round": 6, "half a li')
    log_in(tmp_path).keep(4, [answered("me", 2)], [])
    assert [one["round"] for one in kept_in(tmp_path / FILE)] == [1, 2, 3, 4]
