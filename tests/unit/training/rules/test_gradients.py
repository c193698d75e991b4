"""How lessons agree, on a real small policy: it looks, and changes nothing."""

import pytest
import torch

from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.rules.book import Entry
from swarmnode.training.rules.gradients import Gradients

MAX_TOKENS = 16


def answers(task: str, *texts: tuple[int, ...], author: str = "me") -> list[Entry]:
    return [
        Entry(task, "1", 0, number, "?", ids, 1.0, author, True, False) for number, ids in enumerate(texts)
    ]


FINDS = answers("sum", (7, 8, 9), (7, 8, 10)) + answers("rev", (20, 21), (20, 22))
LIKE_SUM, LIKE_REV = answers("sum", (7, 8, 11)), answers("rev", (20, 23))


@pytest.fixture
def nudged(policy: Policy) -> Policy:
    """Its adapter is not the identity any more."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def gradients(policy: Policy) -> Gradients:
    forward = Forward(policy, TrainingConfig(), temperature=1.0)
    return Gradients(forward, policy, lambda prompt: (5, 6), max_tokens=MAX_TOKENS)


def test_what_resembles_our_finds_of_its_task_agrees_more_than_what_does_not(nudged: Policy) -> None:
    measure = gradients(nudged)
    same, alike, other = measure(FINDS[:2], [FINDS[:2], LIKE_SUM, answers("sum", (30, 31, 32))])
    assert same is not None and alike is not None and other is not None
    assert same == pytest.approx((1.0, 0.0), abs=1e-5)
    assert alike.cosine > other.cosine


def test_what_we_would_never_write_surprises_more_than_what_we_would(nudged: Policy) -> None:
    with torch.no_grad():
        likely, *_, unlikely = (
            nudged.model(torch.tensor([[5, 6]])).logits[0, -1].argsort(descending=True).tolist()
        )
    found = gradients(nudged)(FINDS[:2], [answers("sum", (likely,)), answers("sum", (unlikely,))])
    assert found[0] is not None and found[1] is not None
    assert found[0].surprise < found[1].surprise


def test_finds_of_other_tasks_are_left_out_and_stand_in_where_there_are_no_others(nudged: Policy) -> None:
    measure = gradients(nudged)
    beside = measure(FINDS, [LIKE_SUM, LIKE_REV, answers("new", (7, 8, 11))])
    assert measure(FINDS[:2], [LIKE_SUM])[0] == pytest.approx(beside[0], abs=1e-5)
    assert measure(FINDS[2:], [LIKE_REV])[0] == pytest.approx(beside[1], abs=1e-5)
    assert beside[2] is not None


def test_each_task_counts_by_its_answers_and_our_finds_however_much_it_surprises(nudged: Policy) -> None:
    long, finds = answers("sum", (30, 31, 32) * 4), [*FINDS[:1], *FINDS[2:]]
    assert [one.task for one in finds] == ["sum", "rev", "rev"]
    of_long, of_rev, of_both = gradients(nudged)(finds, [long, LIKE_REV[:1], long + 2 * LIKE_REV[:1]])
    assert of_long is not None and of_rev is not None
    # One answer beside one find counts half as much as two beside two.
    weighed = [(long + 2 * rev) / 3 for long, rev in zip(of_long, of_rev, strict=True)]
    assert of_both == pytest.approx(weighed, abs=1e-5)


def test_it_leaves_no_gradient_and_no_weight_changed(nudged: Policy) -> None:
    before = [parameter.detach().clone() for parameter in nudged.parameters]
    gradients(nudged)(FINDS, [LIKE_SUM])
    assert all(parameter.grad is None for parameter in nudged.parameters)
    assert all(torch.equal(now, then) for now, then in zip(nudged.parameters, before, strict=True))


def test_what_our_sampler_could_not_write_is_not_looked_at(nudged: Policy) -> None:
    too_long = answers("sum", tuple(range(7, 8 + MAX_TOKENS)))
    assert gradients(nudged)(FINDS, [too_long, []]) == [None, None]
    assert gradients(nudged)(too_long, [LIKE_SUM]) == [None]


def test_lists_that_share_a_pass_have_the_gradients_that_each_has_alone(nudged: Policy) -> None:
    lists = [LIKE_SUM, LIKE_REV, answers("sum", (30, 31, 32)), FINDS]
    for one, together in zip(lists, gradients(nudged)(FINDS, lists), strict=True):
        assert together == pytest.approx(gradients(nudged)(FINDS, [one])[0], abs=1e-5)


def test_where_layers_are_computed_again_each_list_has_a_pass_of_its_own(nudged: Policy) -> None:
    lists = [LIKE_SUM, LIKE_REV, FINDS]
    expected = gradients(nudged)(FINDS, lists)
    forward = Forward(nudged, TrainingConfig(gradient_checkpointing="on"), temperature=1.0)
    measure = Gradients(forward, nudged, lambda prompt: (5, 6), max_tokens=MAX_TOKENS)
    for found, wanted in zip(measure(FINDS, lists), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
