"""What the ledger tells: the first of each reason, with its author and cause."""

import logging

import pytest

from swarmnode.exchange.drop_reasons import NOT_NEEDED, Reason
from swarmnode.exchange.peers.ledger import MOST_DETAIL, MOST_LOGGED, Ledger
from swarmnode.exchange.peers.reputation import (
    BAN_BELOW,
    FORGIVE_AT,
    FULL_SCORE,
    RECOVERY_PER_S,
    Reputation,
)


@pytest.fixture
def ledger(caplog: pytest.LogCaptureFixture) -> Ledger:
    caplog.set_level(logging.INFO, "swarmnode")
    return Ledger(Reputation(), lambda: 0.0)


def test_the_first_of_a_reason_is_told_and_further_ones_are_counted(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        ledger.drop(Reason.TOO_LONG, "mallory", "8 of 8 answers")
    ledger.drop(Reason.OTHER_TASK, "trudy")
    first, second = caplog.messages
    assert "(mallory): too_long: 8 of 8 answers; further ones" in first
    assert "(trudy): other_task; further ones" in second
    assert ledger.dropped == {Reason.TOO_LONG: 2, Reason.OTHER_TASK: 1}


def test_the_first_of_each_peer_is_told_until_there_are_many(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2 * MOST_LOGGED):
        ledger.drop(Reason.TOO_LONG, f"mallory {number}", "8 of 8 answers")
    assert "(mallory 1): too_long" in caplog.messages[1] and len(caplog.messages) < MOST_LOGGED
    ledger.drop(Reason.WRONG_BODY, "trudy")
    assert "(trudy): wrong_body" in caplog.messages[-1], "a reason that was not told yet is told"


def test_what_was_used_all_the_same_is_not_said_to_be_unused(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.drop(Reason.FALSE_CLAIM, "mallory", "last: 1 and 0")
    assert caplog.messages[0].startswith("counted against its author, from ")


def test_what_was_not_needed_is_counted_alone(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    for reason in NOT_NEEDED:
        ledger.drop(reason, "alice", "nobody is to blame")
    assert ledger.dropped == dict.fromkeys(NOT_NEEDED, 1) and caplog.messages == []


def test_words_of_others_fill_no_log(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    ledger.drop(Reason.UNSCORABLE, "mallory", "x" * 10_000)
    assert len(caplog.messages[0]) < MOST_DETAIL + 200


def test_words_that_a_task_made_up_for_a_reason_are_counted_as_an_internal_error(ledger: Ledger) -> None:
    ledger.drop("the moon is full", "alice")
    assert ledger.dropped == {Reason.INTERNAL: 1}


def test_what_costs_nothing_does_not_make_us_remember_a_peer_but_is_noted_of_those_we_do(
    ledger: Ledger,
) -> None:
    ledger.drop(Reason.OTHER_TASK, "passer-by")
    assert len(ledger.reputation) == 0
    ledger.drop(Reason.TOO_LONG, "mallory")
    ledger.drop(Reason.OTHER_TASK, "mallory")
    (mallory,) = ledger.reputation.figures(0.0)
    assert (mallory.dropped, mallory.refused) == (1, {"too_long": 1, "other_task": 1})


def test_who_is_banned_is_told_of_once_with_the_time_that_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    banned: list[tuple[str, float]] = []
    ledger = Ledger(Reputation(), lambda: 0.0, on_ban=lambda peer, for_s: banned.append((peer, for_s)))
    offences = int(FULL_SCORE // Reason.WRONG_BODY.points) + 1
    for _ in range(offences):
        ledger.drop(Reason.WRONG_BODY, "mallory")
    ((peer, for_s),) = banned
    score = FULL_SCORE - Reason.WRONG_BODY.points * next(
        number for number in range(offences) if FULL_SCORE - Reason.WRONG_BODY.points * number < BAN_BELOW
    )
    assert (peer, for_s) == ("mallory", (FORGIVE_AT - score) / RECOVERY_PER_S)
    assert sum("(mallory) is banned for now" in message for message in caplog.messages) == 1


def test_what_left_unused_is_counted_only_where_something_did(ledger: Ledger) -> None:
    ledger.count_unused(Reason.STALE, 0)
    assert ledger.dropped == {}
    ledger.count_unused(Reason.STALE, 2)
    ledger.count_unused(Reason.STALE)
    assert ledger.dropped == {Reason.STALE: 3}


def test_what_was_accepted_counts_for_its_author(ledger: Ledger) -> None:
    ledger.accept("alice")
    assert (ledger.accepted, ledger.reputation.standing_of("alice").accepted) == (1, 1)
