"""What strangers say is read by people: it moves no cursor, sets no title and begins no line."""

from collections.abc import Callable

import pytest

from benchmarks.attackers.handle import Attacker
from tests.joined_node import JoinedNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

MEMBER = (
    *("--pipeline", "attic", "--task", "rev", "--set", "exchange.enabled=false"),
    *("--set", "pipeline.stages=2", "--set", "pipeline.wait_for_members=2"),
)


def test_the_words_of_a_member_reach_the_log_without_control_characters(
    start: Callable[..., JoinedNode],
) -> None:
    node = start(*MEMBER)
    with Attacker("steering_member", [node.running().addresses[0]], seconds=240, about="attic") as attacker:
        attacker.wait_for("proposed")
        node.until(lambda: "evil.example" in node.story)
    log = "".join(path.read_text() for path in node.paths.logs.glob("*.log"))
    for text in (node.story, log):
        assert all(line.isprintable() for line in text.split("\n"))
        assert not any(line.startswith("error: your key") for line in text.split("\n"))
