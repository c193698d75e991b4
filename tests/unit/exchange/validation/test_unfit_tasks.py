"""Tasks whose episodes our own environment does not play in time."""

import pytest

from swarmnode.exchange.limits import (
    UNFIT_S,
    UNFIT_TRIAL_S,
)
from swarmnode.exchange.validation.unfit_tasks import UnfitTasks


@pytest.mark.parametrize("known", [False, True])
def test_a_task_that_overruns_for_three_authors_and_fits_for_nobody_is_given_up_for_a_while(known: bool):
    unfit = UnfitTasks()
    assert not unfit.note_overrun("slow", "a", 0.0, known=known)
    assert not unfit.note_overrun("slow", "a", 1.0, known=known)
    assert not unfit.note_overrun("slow", "b", 2.0, known=known)
    assert unfit.tasks(2.0, known=known) == frozenset()
    assert unfit.note_overrun("slow", "c", 3.0, known=known)
    assert unfit.tasks(3.0, known=known) == {"slow"}
    assert unfit.tasks(0.0, known=known) == frozenset(), "our clock was set back"
    unfit.note_try("slow", UNFIT_S, known=known)
    assert unfit.tasks(3.0 + UNFIT_S, known=known) == frozenset()
    assert not unfit.note_overrun("slow", "c", 4.0 + UNFIT_S, known=known)


def test_a_few_identities_cannot_shut_a_task_of_which_others_groups_fit():
    unfit = UnfitTasks()
    unfit.note_fit("game", 0.0)
    told = [unfit.note_overrun("game", f"name {number}", 1.0 + number, known=False) for number in range(10)]
    assert not any(told) and unfit.tasks(11.0, known=False) == frozenset()


def test_a_group_that_fits_makes_up_for_all_that_overran_before():
    unfit = UnfitTasks()
    for name in "ab":
        unfit.note_overrun("game", name, 0.0, known=False)
    unfit.note_fit("game", 1.0)
    assert not unfit.note_overrun("game", "c", 2.0 + UNFIT_S, known=False)


def test_newcomers_whose_groups_overrun_shut_a_task_to_newcomers_alone():
    unfit = UnfitTasks()
    for number in range(100):
        unfit.note_overrun("game", f"name {number}", float(number), known=False)
    assert unfit.tasks(100.0, known=False) == {"game"} and unfit.tasks(100.0, known=True) == frozenset()
    unfit.note_fit("game", 101.0)
    assert unfit.tasks(101.0, known=False) == frozenset(), (
        "an author that we know shows that it can be played"
    )


@pytest.mark.parametrize("known", [False, True])
def test_a_task_that_is_given_up_is_tried_once_a_while_and_opens_when_a_group_fits(known: bool):
    unfit = UnfitTasks()
    for name in "abc":
        unfit.note_overrun("game", name, 0.0, known=known)
    assert unfit.tasks(UNFIT_TRIAL_S - 1, known=known) == {"game"}
    assert unfit.tasks(UNFIT_TRIAL_S, known=known) == frozenset()
    unfit.note_try("game", UNFIT_TRIAL_S, known=known)
    assert unfit.tasks(UNFIT_TRIAL_S + 1, known=known) == {"game"}
    told = [unfit.note_overrun("game", name, UNFIT_TRIAL_S + 1, known=known) for name in "def"]
    assert not any(told), "it is told once"
    unfit.note_fit("game", UNFIT_TRIAL_S + 2)
    assert unfit.tasks(UNFIT_TRIAL_S + 2, known=known) == frozenset()
