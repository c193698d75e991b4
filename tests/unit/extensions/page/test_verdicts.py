"""What the page says first, in words."""

from pathlib import Path

from msgspec.structs import replace

from swarmnode.extensions.page.reward_history import RewardHistory, RoundRewards
from swarmnode.extensions.page.verdicts import helping, learning, pace, sampler, why_little
from swarmnode.node.showing.node_status import NodeStatus, Phase, Progress, Rewards
from swarmnode.training.records import TrainReport
from tests.shown_page import STATUS

NEW = replace(STATUS, reward=Rewards())


def history(*own: float) -> RewardHistory:
    found = RewardHistory(Path("/nowhere"), "", "")
    found.rounds = [RoundRewards(number, value) for number, value in enumerate(own, 1)]
    return found


def test_a_reward_that_rises_is_learning_and_one_that_does_not_is_not_yet() -> None:
    rising = [number / 100 for number in range(40)]
    assert (learning(NEW, history(*rising)).tone, learning(NEW, history(*rising)).word) == ("good", "yes")
    assert learning(NEW, history(*[0.5] * 40)).word == "not yet"
    assert learning(NEW, history(*[0.5] * 3)).word == "too early to tell"


def test_held_out_examples_decide_where_they_were_measured_twice() -> None:
    flat = history(*[0.5] * 40)
    reward = Rewards(eval_first=0.2, eval_last=0.6, eval_round=40)
    found = learning(replace(NEW, reward=reward), flat)
    assert found.word == "yes" and "held out 0.20 to 0.60 after round 40" in found.text
    worse = replace(reward, eval_last=0.1)
    assert learning(replace(NEW, reward=worse), history(*[n / 100 for n in range(40)])).word == "not yet"


def test_a_round_without_any_gradient_is_told_with_its_reason() -> None:
    reward = Rewards(groups=32, without_gradient={"all_zero": 32})
    status = replace(NEW, reward=reward, advice="no answer to rev was right in 20 rounds")
    assert learning(status, history(*[0.0] * 40)).tone == "bad"
    assert why_little(status) == [
        "no answer to rev was right in 20 rounds",
        "32 of 32 groups have no gradient: all answers fail",
    ]


def test_several_reasons_are_counted_the_most_frequent_first() -> None:
    reward = Rewards(groups=32, without_gradient={"all_full": 5, "all_zero": 12})
    assert why_little(replace(NEW, reward=reward)) == [
        "17 of 32 groups have no gradient: in 12 all answers fail, in 5 all answers are right"
    ]
    assert why_little(NEW) == []


def test_who_helps_says_how_many_may_teach_and_how_many_wait() -> None:
    found = helping(replace(STATUS, training=TrainReport(teaching=1, waiting=2, book_foreign=5)))
    assert (found.tone, found.word) == ("good", "1 may teach")
    assert found.text == "2 peers, learnt from 1; 2 wait until their answers agree with ours"
    assert helping(replace(STATUS, training=TrainReport(teaching=1))).tone == "open", "nothing is learnt yet"
    waits = helping(replace(STATUS, training=TrainReport(waiting=1)))
    assert waits.word == "all wait" and waits.text.endswith("; 1 waits until its answers agree with ours")
    assert helping(STATUS).word == "not measured", "as under a rule that lets everybody teach"


def test_the_phase_that_takes_most_of_the_time_is_named() -> None:
    phases = (Phase("generating", 10.0), Phase("training", 13.0), Phase("generating", 14.0))
    found = pace(replace(STATUS, earlier=phases, phase=Phase("training", 17.0)))
    assert found.word == "generating 86%"


def sampled(gap: float | None, version: int = 50) -> NodeStatus:
    progress = Progress(policy_version=version)
    return replace(STATUS, progress=progress, training=TrainReport(engine_gap=gap))


def since(gap: float) -> list[RoundRewards]:
    return [RoundRewards(number, 0.5, engine_gap=gap) for number in range(1, 20)]


def test_a_sampler_that_agrees_says_how_far_apart_they_are() -> None:
    found = sampler(sampled(0.003), since(0.003))
    assert (found.tone, found.word) == ("good", "sampler and trainer agree")
    assert found.text == "mean difference of 0.0030 nats per token"
    assert sampler(sampled(None), []).word == "not measured"


def test_an_engine_that_runs_an_old_policy_is_an_error_with_a_name() -> None:
    found = sampler(sampled(0.08), since(0.002))
    assert (found.tone, found.word) == ("bad", "the engine runs an old policy")
    assert found.text.startswith("SamplerLagsBehind: mean difference of 0.0800 nats")
    found = sampler(sampled(0.5), since(0.5))
    assert found.tone == "bad" and found.text.startswith("SamplerDisagrees")
    assert sampler(sampled(0.08), since(0.07)).tone == "warn"
