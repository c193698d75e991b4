"""What a run of one or several policies ends with."""

import json
from dataclasses import replace

import pytest

from swarmnode.errors import CheckpointError, EngineError, StorageError
from swarmnode.node.showing.ending import ending
from swarmnode.node.showing.node_status import Summary


def summary(peer: str, rounds: int = 2) -> Summary:
    return Summary(peer, rounds, 100 * rounds, 1.5 * rounds, 0.1, 0.2, rounds, {}, rounds, "all rounds done")


def test_one_policy_ends_with_its_summary() -> None:
    result = ending(["a"], [summary("a")])
    assert result.exit_code == 0
    assert json.loads(result.line)["peer"] == "a"


def test_the_only_policys_error_is_the_processes() -> None:
    with pytest.raises(EngineError, match="gone"):
        ending(["a"], [EngineError("gone")])


def test_several_policies_end_with_all_summaries_and_totals() -> None:
    result = ending(["a", "b"], [summary("a", 2), summary("b", 3)])
    found = json.loads(result.line)
    assert [policy["peer"] for policy in found["policies"]] == ["a", "b"]
    assert found["totals"] == {"rounds": 5, "tokens": 500, "seconds": 4.5, "failed": 0}
    assert result.exit_code == 0


@pytest.mark.parametrize("policies", [1, 2])
def test_rounds_that_could_not_be_saved_fail_the_process(policies: int) -> None:
    done = [summary("a"), replace(summary("b"), not_saved="round 2 could not be saved: the disk is full")]
    result = ending(["a", "b"][-policies:], done[-policies:])
    assert result.exit_code == StorageError.exit_code and "the disk is full" in result.line


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (CheckpointError("damaged"), "damaged", CheckpointError.exit_code),
        (KeyError("bug"), "KeyError: 'bug'", 1),
        (ExceptionGroup("tasks", [ExceptionGroup("task", [ValueError("7")])]), "ValueError: 7", 1),
        (
            ExceptionGroup("tasks", [KeyError("bug"), CheckpointError("damaged")]),
            "damaged",
            CheckpointError.exit_code,
        ),
    ],
)
def test_one_failed_policy_fails_the_process_and_the_others_results_are_kept(
    error: Exception, text: str, code: int
) -> None:
    both = ["a", "b"]
    result = ending(both, [error, summary("b")])
    first, second = json.loads(result.line)["policies"]
    assert first == {"peer": "a", "error": text}
    assert second["peer"] == "b"
    assert result.exit_code == code


def test_where_all_fail_the_first_error_is_told() -> None:
    both = ["a", "b"]
    with pytest.raises(CheckpointError):
        ending(both, [CheckpointError("damaged"), EngineError("gone")])
    with pytest.raises(KeyError):
        ending(both, [CheckpointError("damaged"), KeyError("bug")])
