"""One member: attempts that come again or not at all, and peers that send nonsense."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.errors import CheckpointError, Rejected
from swarmnode.extensions.pipeline.replication.contribution_tally import sum_in_order
from swarmnode.extensions.pipeline.stages.micro_batches import (
    GradientSum,
    MicroBatchAttempt,
    StageInput,
)
from swarmnode.extensions.pipeline.stages.packed_state import pack_state, unpack_state
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings, build_stage
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.model.attention import packed_layout
from swarmnode.training.losses import LossOutput
from tests.unit.extensions.pipeline.tiny_models import CPU, LAYERS, SETTINGS, nudge, tiny_config, tiny_model

PACKS = try_cut(tiny_config())
MODEL = tiny_model()
FULL = StageSettings(trainable="full")
NAN, INF = float("nan"), float("inf")


def worker(
    first: int = 2, end: int = 4, stage: StageSettings = SETTINGS, packs: bool = PACKS, **more: Any
) -> StageWorker:
    state = {name: p.detach().clone() for name, p in MODEL.named_parameters()}
    part = StagePart(first, end, has_ends=first == 0)
    model = build_stage(MODEL.config, part, lambda names: {n: state[n] for n in names}, stage, packs)
    if stage.trainable == "lora":
        nudge(model.trainable())
    return StageWorker(model, **{"slots": 2, "max_tokens": 64, **more})


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (1, 5, 32)), generator=torch.Generator().manual_seed(seed))


def item(attempt: MicroBatchAttempt, seed: int = 0, **more: Any) -> StageInput:
    return StageInput(attempt, **{"values": noise(seed), "tokens": 4, **more})


def attempt(agent: int = 0, wave: int = 0, number: int = 0, iteration: int = 0) -> MicroBatchAttempt:
    return MicroBatchAttempt(agent, iteration, wave, number)


def back(found: StageWorker, attempt: MicroBatchAttempt, gradient_BTD: Tensor) -> Tensor | None:
    """The way back, with its answer taken."""
    answer = found.backward(attempt, gradient_BTD)
    found.commit(attempt)
    return answer


def refused(reason: Refusal) -> Any:
    return pytest.raises(Rejected, match=f"^{reason.value}")


def equal(one: GradientSum, other: GradientSum) -> bool:
    same = one.tensors.keys() == other.tensors.keys()
    counts = (one.tokens, one.visits) == (other.tokens, other.visits)
    return (
        same
        and counts
        and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    )


def same_state(one: StageWorker, other: StageWorker) -> bool:
    return one.state().data == other.state().data


# Agents


def test_micro_batches_of_several_agents_are_in_flight_at_once() -> None:
    apart, together = worker(), worker()
    for agent in (0, 1):
        apart.forward(item(attempt(agent), seed=agent))
        back(apart, attempt(agent), noise(10 + agent))
        together.forward(item(attempt(agent), seed=agent))
    for agent in (0, 1):
        back(together, attempt(agent), noise(10 + agent))
    assert equal(apart.take_gradients(), together.take_gradients())


def test_a_released_micro_batch_does_not_come_back() -> None:
    found = worker()
    found.forward(item(attempt()))
    found.release(0)
    with refused(Refusal.UNKNOWN_WORK):
        back(found, attempt(), noise(1))


def test_no_more_micro_batches_are_here_than_memory_was_planned_for() -> None:
    found = worker(slots=2)
    for agent in (0, 1):
        found.forward(item(attempt(agent)))
    with refused(Refusal.NO_SLOT):
        found.forward(item(attempt(agent=2)))
    found.forward(item(attempt(agent=1, wave=1)))
    found.release(0)
    found.forward(item(attempt(agent=2)))


def test_an_agent_goes_on_wave_after_wave() -> None:
    found = worker(slots=1)
    for wave in range(3):
        found.forward(item(attempt(wave=wave), seed=wave))
        back(found, attempt(wave=wave), noise(wave))
    assert found.take_gradients().visits == 3


# Attempts that come again


def test_a_second_attempt_gets_its_gradient_but_adds_none_where_the_first_came_back() -> None:
    once, again = worker(), worker()
    once.forward(item(attempt()))
    back(once, attempt(), noise(1))
    again.forward(item(attempt()))
    back(again, attempt(), noise(1))
    again.forward(item(attempt(number=1), seed=2))
    answer = back(again, attempt(number=1), noise(3))
    other = worker()
    other.forward(item(attempt(), seed=2))
    assert torch.equal(answer, back(other, attempt(), noise(3)))  # pyright: ignore[reportArgumentType]
    assert equal(again.take_gradients(), once.take_gradients())


def test_a_second_attempt_takes_the_place_of_a_first_that_never_came_back() -> None:
    found, other = worker(slots=1), worker()
    found.forward(item(attempt()))
    found.forward(item(attempt(number=1), seed=2))
    with refused(Refusal.UNKNOWN_WORK):
        back(found, attempt(), noise(1))
    back(found, attempt(number=1), noise(1))
    other.forward(item(attempt(), seed=2))
    back(other, attempt(), noise(1))
    assert equal(found.take_gradients(), other.take_gradients())


Event = st.tuples(
    st.sampled_from(["forward", "backward", "release"]),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 1),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(Event, max_size=25))
def test_whatever_order_messages_come_in_each_micro_batch_counts_at_most_once(events: list[Any]) -> None:
    found, came_back = PLAYED, set[tuple[int, int, int]]()
    found.take_gradients()
    for agent in range(3):
        found.release(agent)
    for kind, agent, wave, number in events:
        now = attempt(agent, wave, number, found.iteration)
        try:
            match kind:
                case "forward":
                    found.forward(item(now, tokens=1 + wave))
                case "backward":
                    back(found, now, noise(1))
                    came_back.add(now.micro_batch)
                case _:
                    found.release(agent)
        except Rejected:
            pass
    taken = found.take_gradients()
    assert taken.visits == len(came_back)
    assert taken.tokens == sum(1 + wave for _, _, wave in came_back)


PLAYED = worker(3, 4)


# What counts


def test_gradients_count_when_their_answer_was_taken_and_not_before() -> None:
    found, other = worker(), worker()
    for one in (found, other):
        one.forward(item(attempt()))
        one.backward(attempt(), noise(1))
    assert found.counted == frozenset()
    found.commit(attempt())
    found.commit(attempt())
    assert found.counted == {attempt().micro_batch}
    assert found.take_gradients().visits == 1
    other.discard(attempt())
    other.commit(attempt())
    assert other.take_gradients() == GradientSum({}, 0, 0)


def test_of_two_attempts_that_came_back_one_counts() -> None:
    found, once = worker(), worker()
    for number, seed in ((0, 0), (1, 2)):
        found.forward(item(attempt(number=number), seed=seed))
        found.backward(attempt(number=number), noise(1 + number))
    found.commit(attempt(number=1))
    found.commit(attempt(number=0))
    once.forward(item(attempt(), seed=2))
    back(once, attempt(), noise(2))
    assert equal(found.take_gradients(), once.take_gradients())


def test_an_undecided_answer_survives_the_next_micro_batch_in_its_slot() -> None:
    found = worker()
    found.forward(item(attempt()))
    found.backward(attempt(), noise(1))
    found.forward(item(attempt(wave=1)))
    found.commit(attempt())
    assert found.take_gradients().visits == 1


def test_no_more_answers_are_undecided_than_there_are_slots() -> None:
    found = worker(slots=2)
    for wave in range(3):
        found.forward(item(attempt(wave=wave)))
        found.backward(attempt(wave=wave), noise(1))
    for wave in range(3):
        found.commit(attempt(wave=wave))
    assert found.counted == {attempt(wave=wave).micro_batch for wave in (1, 2)}


@pytest.mark.parametrize("activations", ["kept", "recomputed"])
@pytest.mark.parametrize("was_back", [False, True])
def test_another_attempt_with_the_same_input_is_not_computed_again(activations: Any, was_back: bool) -> None:
    found, once = worker(activations=activations), worker()
    first = found.forward(item(attempt()))
    if was_back:
        found.backward(attempt(), noise(2))
    again = found.forward(item(attempt(number=1)))
    assert again.data_ptr() == first.data_ptr()
    once.forward(item(attempt()))
    answers = [back(found, attempt(number=1), noise(1)), back(once, attempt(), noise(1))]
    assert torch.equal(*answers)  # pyright: ignore[reportArgumentType]
    assert equal(found.take_gradients(), once.take_gradients())
    with refused(Refusal.UNKNOWN_WORK):
        found.backward(attempt(), noise(1))


def test_another_layout_is_another_input() -> None:
    found = worker()
    layouts = [packed_layout(lengths, CPU) for lengths in ([2, 3], [3, 2])]
    one, other = (found.forward(item(attempt(number=n), layout=layout)) for n, layout in enumerate(layouts))
    assert not torch.equal(one, other)


# The end of an iteration


def test_stragglers_of_a_closed_iteration_are_dropped_and_refused() -> None:
    found = worker()
    found.forward(item(attempt()))
    assert found.take_gradients() == GradientSum({}, 0, 0)
    with refused(Refusal.UNKNOWN_WORK):
        back(found, attempt(), noise(1))
    with refused(Refusal.UNKNOWN_WORK):
        found.forward(item(attempt(number=1)))
    found.forward(item(attempt(iteration=1)))
    back(found, attempt(iteration=1), noise(1))
    assert found.take_gradients().visits == 1


def test_replicas_sum_up_to_what_one_member_would_have_seen() -> None:
    alone, replicas = worker(), [worker(), worker()]
    for wave in range(3):
        for one in (alone, replicas[wave % 2]):
            one.forward(item(attempt(wave=wave), seed=wave, tokens=1 + wave))
            back(one, attempt(wave=wave), noise(wave))
    summed, expected = sum_in_order([one.take_gradients() for one in replicas]), alone.take_gradients()
    assert (summed.tokens, summed.visits) == (expected.tokens, expected.visits) == (6, 3)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(summed.tensors[name], tensor)


def test_the_optimizer_moves_the_own_layers_along_the_gradient_clipped() -> None:
    found = worker()
    found.forward(item(attempt()))
    back(found, attempt(), noise(1))
    gradients = found.take_gradients().of_step(4)
    before = {name: p.detach().clone() for name, p in found.model.trainable().items()}
    optimizer = torch.optim.SGD(found.model.trainable().values(), lr=1.0)
    norm = found.apply(gradients, optimizer, max_norm=0.5)
    assert norm == pytest.approx(sum(t.square().sum().item() for t in gradients.values()) ** 0.5, rel=1e-4)
    for name, parameter in found.model.trainable().items():
        expected = before[name] - gradients[name] * (0.5 / (norm or NAN))
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)
        assert parameter.grad is None


def test_gradients_that_lie_transposed_in_memory_step_as_any_others() -> None:
    """As those of LoRA's B come; the fused optimizer reads memory in its order."""
    plain, transposed = worker(), worker()
    gradients = {name: noise(3, *p.shape) for name, p in plain.model.trainable().items()}
    turned = {name: gradient.t().contiguous().t() for name, gradient in gradients.items()}
    for found, those in ((plain, gradients), (transposed, turned)):
        optimizer = torch.optim.AdamW(found.model.trainable().values(), lr=0.1, fused=True)
        found.apply(those, optimizer, max_norm=1e9)
    assert same_state(plain, transposed)


def test_a_stage_that_nobody_visited_takes_no_step() -> None:
    found, other = worker(), worker()
    optimizer = torch.optim.AdamW(found.model.trainable().values(), lr=1.0)
    assert found.apply(found.take_gradients().of_step(4), optimizer, max_norm=1.0) is None
    assert same_state(found, other)


@pytest.mark.parametrize("damage", ["nan", "overflow", "shape", "name"])
def test_damaged_averages_move_nothing(damage: str) -> None:
    found, untouched = worker(), worker()
    gradients = {name: torch.ones_like(p) for name, p in found.model.trainable().items()}
    last = list(gradients)[-1]
    match damage:
        case "nan":
            gradients[last][0, 0] = NAN
        case "overflow":
            gradients[last].fill_(3e38)
        case "shape":
            gradients[last] = gradients[last][:1]
        case _:
            gradients["model.layers.99.mlp"] = gradients[last]
    optimizer = torch.optim.SGD(found.model.trainable().values(), lr=1.0)
    with refused(Refusal.NOT_FINITE if damage in ("nan", "overflow") else Refusal.WRONG_SHAPE):
        found.apply(gradients, optimizer, max_norm=1.0)
    assert same_state(found, untouched)
    assert all(p.grad is None for p in found.model.trainable().values())


# What peers send


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_numbers_that_are_not_finite_are_refused_and_change_nothing(number: float) -> None:
    found, clean = worker(), worker()
    bad = noise(0)
    bad[0, 2, 3] = number
    with refused(Refusal.NOT_FINITE):
        found.forward(item(attempt(), values=bad))
    found.forward(item(attempt()))
    with refused(Refusal.NOT_FINITE):
        back(found, attempt(), bad)
    back(found, attempt(), noise(1))
    clean.forward(item(attempt()))
    back(clean, attempt(), noise(1))
    assert equal(found.take_gradients(), clean.take_gradients())


def test_own_layers_that_overflow_send_nothing_on() -> None:
    found = worker(stage=FULL)
    with torch.no_grad():
        found.model.trainable()["model.layers.3.mlp.down_proj.weight"].mul_(1e39)
    with refused(Refusal.NOT_FINITE):
        found.forward(item(attempt()))


def test_a_gradient_that_overflows_in_the_own_layers_is_dropped_and_never_added() -> None:
    found = worker()
    found.forward(item(attempt()))
    with refused(Refusal.NOT_FINITE):
        back(found, attempt(), torch.full((1, 5, 32), 3e38))
    taken = found.take_gradients()
    assert (taken.tensors, taken.visits) == ({}, 0)


@pytest.mark.parametrize("ids", [[[1, 40]], [[-1, 2]]])
def test_the_data_stage_refuses_tokens_beyond_its_vocabulary(ids: list[list[int]]) -> None:
    found = worker(first=0, end=2)
    with refused(Refusal.WRONG_SHAPE):
        found.forward(item(attempt(), values=torch.tensor(ids), tokens=1))


def test_half_precision_from_the_wire_is_computed_in_the_stages_own_type() -> None:
    found = worker()
    assert found.forward(item(attempt(), values=noise(0).half())).dtype == torch.float32
    answer = back(found, attempt(), noise(1).bfloat16())
    assert answer is not None and answer.dtype == torch.float32


# The data stage


def squares(hidden_BTD: Tensor) -> LossOutput:
    return LossOutput(hidden_BTD.square().sum(), torch.tensor(0), None, None)


def test_the_loss_gives_the_gradient_of_what_came_back() -> None:
    found = worker(first=0, end=2)
    found.forward(item(attempt(), values=torch.tensor([[3, 4, 5]]), tokens=2))
    back_BTD = noise(1, 1, 3, 32)
    loss, gradient_BTD = found.loss(attempt(), back_BTD, squares)
    assert loss == pytest.approx(back_BTD.square().sum().item())
    torch.testing.assert_close(gradient_BTD, 2 * back_BTD)
    assert back(found, attempt(), noise(3, 1, 3, 32)) is None
    assert found.take_gradients().visits == 1


def test_a_loss_that_comes_twice_moves_norm_and_head_once() -> None:
    def through_head(hidden_BTD: Tensor) -> LossOutput:
        model = found.model
        return squares(model.head(model.final_norm(hidden_BTD)))

    taken: list[GradientSum] = []
    for attempts in (1, 2):
        found = worker(first=0, end=2, stage=FULL)
        for number in range(attempts):
            now = attempt(number=number)
            found.forward(item(now, values=torch.tensor([[3, 4, 5]]), tokens=2))
            found.loss(now, noise(1, 1, 3, 32), through_head)
            found.loss(now, noise(1, 1, 3, 32), through_head)
        taken.append(found.take_gradients())
    assert "model.norm.weight" in taken[0].tensors
    assert equal(*taken)


def test_what_comes_back_for_the_loss_is_checked_like_all_that_peers_send() -> None:
    found = worker(first=0, end=2)
    found.forward(item(attempt(), values=torch.tensor([[3, 4, 5]]), tokens=2))
    with refused(Refusal.NOT_FINITE):
        found.loss(attempt(), torch.full((1, 3, 32), NAN), squares)
    with refused(Refusal.NOT_FINITE):
        found.loss(attempt(), torch.full((1, 3, 32), 3e38), lambda h: squares(h * 1e10))


# Activations


def test_recomputing_gives_the_same_gradients_and_keeps_no_graph() -> None:
    kept, recomputed = worker(), worker(activations="recomputed")
    graphs, answers = list[bool](), list[Tensor | None]()
    for found in (kept, recomputed):
        found.forward(item(attempt()))
        graphs.append(found._work[0].output_BTD.requires_grad)  # pyright: ignore
        answers.append(back(found, attempt(), noise(1)))
    assert graphs == [True, False]
    assert torch.equal(*answers)  # pyright: ignore[reportArgumentType]
    assert equal(kept.take_gradients(), recomputed.take_gradients())


# State


def learnt(workers: Sequence[StageWorker]) -> dict[str, Tensor]:
    return {name: t for one in workers for name, t in unpack_state(one.state().data).items()}


@pytest.mark.parametrize("stage", [SETTINGS, FULL], ids=["lora", "full"])
def test_a_state_loads_under_another_partition(stage: StageSettings) -> None:
    ends = [1, 4, LAYERS]
    old = [worker(a, b, stage) for a, b in zip([0, *ends], ends, strict=False)]
    for found in old:
        nudge(found.model.trainable())
    tensors = learnt(old)
    assert {n for f in old for n in f.model.trainable()} == set(tensors)
    new = [worker(a, b, stage) for a, b in ((0, 3), (3, LAYERS))]
    for found in new:
        found.load_state(tensors)
        assert all(torch.equal(p, tensors[n]) for n, p in found.model.trainable().items())
    assert pack_state(learnt(new)) == pack_state(tensors)


def adam(found: StageWorker) -> torch.optim.Optimizer:
    return torch.optim.AdamW(found.model.trainable().values(), lr=1e-2)


def train(found: StageWorker, optimizer: torch.optim.Optimizer, seed: int) -> None:
    now = attempt(iteration=found.iteration)
    found.forward(item(now, seed=seed))
    back(found, now, noise(seed + 10))
    found.apply(found.take_gradients().of_step(4), optimizer, max_norm=1.0)


def test_training_goes_on_from_a_state_as_if_it_had_not_stopped() -> None:
    through, stopped = worker(), worker()
    optimizer = adam(through)
    train(through, optimizer, seed=1)
    tensors = unpack_state(through.state(optimizer).data)
    train(through, optimizer, seed=2)
    again = adam(stopped)
    stopped.load_state(tensors, again)
    train(stopped, again, seed=2)
    assert same_state(through, stopped)
    fresh = worker()
    fresh.load_state(tensors)
    train(fresh, adam(fresh), seed=2)
    assert not same_state(through, fresh)


@pytest.mark.parametrize("damage", ["missing", "shape", "nan", "negative"])
def test_moments_that_adam_cannot_go_on_from_change_nothing(damage: str) -> None:
    found, untouched = worker(), worker()
    optimizer = adam(found)
    train(found, optimizer, seed=1)
    tensors = unpack_state(found.state(optimizer).data)
    name = next(name for name in tensors if name.startswith("exp_avg_sq/"))
    match damage:
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = tensors[name][:1]
        case "nan":
            tensors[name][0, 0] = NAN
        case _:
            tensors[name][0, 0] = -1.0
    loaded = worker()
    with pytest.raises(CheckpointError, match=name.removeprefix("exp_avg_sq/")):
        loaded.load_state(tensors, adam(loaded))
    assert same_state(loaded, untouched)


def test_replicas_of_a_stage_have_one_digest_until_they_differ() -> None:
    one, other = worker(), worker()
    assert same_state(one, other)
    with torch.no_grad():
        next(iter(other.model.trainable().values()))[0, 0] += 1e-3
    assert not same_state(one, other)


def test_gradients_and_work_of_the_former_weights_do_not_outlive_them() -> None:
    found = worker()
    found.forward(item(attempt()))
    back(found, attempt(), noise(1))
    found.forward(item(attempt(wave=1)))
    found.load_state(unpack_state(worker().state().data))
    assert found.take_gradients() == GradientSum({}, 0, 0)


@pytest.mark.parametrize("damage", ["missing", "shape", "kind", "nan"])
def test_a_state_that_does_not_fit_changes_nothing(damage: str) -> None:
    found, untouched = worker(), worker()
    tensors = {name: torch.zeros_like(p) for name, p in found.model.trainable().items()}
    last = list(tensors)[-1]
    match damage:
        case "missing":
            del tensors[last]
        case "shape":
            tensors[last] = tensors[last][:1]
        case "kind":
            tensors[last] = tensors[last].long()
        case _:
            tensors[last][0, 0] = NAN
    with pytest.raises(CheckpointError, match=last):
        found.load_state(tensors)
    assert same_state(found, untouched)
