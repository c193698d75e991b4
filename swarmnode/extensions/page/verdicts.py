"""What the page says first, in words: does it learn, does sharing help, what is slow, is the sampler right.

node_status.py, reward_history.py -> [learning, helping, pace, sampler] -> overview.py
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Literal

import msgspec

from swarmnode.extensions.page.reward_history import RewardHistory, RoundRewards
from swarmnode.node.lifecycle import rounds_done
from swarmnode.node.showing.node_status import NodeStatus

Tone = Literal["good", "open", "warn", "bad"]

ROUNDS_TO_JUDGE = 8
"""Rounds before a rise of the reward is looked for."""
RISE = 0.02
"""Least rise of a mean reward that is called one."""
AGREE_NATS = 0.05
"""Mean difference of the log-probabilities of two precisions of the same policy; float32 has a thousandth."""
DISAGREE_NATS = 0.3
GROWN = 4.0
"""Times by which the difference has grown since the first rounds, where the sampler stays behind."""
FIRST_ROUNDS = 10

FLAT_IN_WORDS: Mapping[str, str] = {
    "all_zero": "all answers fail",
    "all_full": "all answers are right",
    "all_equal": "all answers get the same reward",
    "unscored": "no answer got a reward",
}


class PageVerdict(msgspec.Struct, frozen=True):
    """A judgement in one word, and a sentence."""

    tone: Tone
    word: str
    text: str


def learning(status: NodeStatus, history: RewardHistory) -> PageVerdict:
    """Returns whether the reward rises."""
    if not status.learns:
        return PageVerdict("open", "connects others", "a seed has no policy that could learn")
    reward = status.reward
    own = [one.own for one in history.rounds if one.own is not None]
    first, last = reward.eval_first, reward.eval_last
    measured_twice = first is not None and last is not None and (reward.eval_round or 0) > 0
    held_out = f"held out {first:.2f} to {last:.2f} after round {reward.eval_round}" if measured_twice else ""
    if status.advice and reward.groups and sum(reward.without_gradient.values()) == reward.groups:
        return PageVerdict("bad", "no", status.advice)
    if len(own) < ROUNDS_TO_JUDGE:
        return PageVerdict("open", "too early to tell", held_out or rounds_done(len(own)))
    quarter = max(2, len(own) // 4)
    before, now = fmean(own[:quarter]), fmean(own[-quarter:])
    trend = f"own reward {before:.2f} to {now:.2f}"
    rises = now - before >= RISE
    if measured_twice and last is not None and first is not None:
        rises = last - first >= RISE
        trend = f"{held_out}, {trend}"
    if rises:
        return PageVerdict("good", "yes", trend)
    return PageVerdict("warn", "not yet", trend)


def why_little(status: NodeStatus) -> list[str]:
    """Returns what keeps the policy from learning now, in sentences."""
    flat, groups = status.reward.without_gradient, status.reward.groups
    found = [status.advice] if status.advice else []
    if flat and groups:
        most_first = sorted(flat.items(), key=lambda one: -one[1])
        parts = [(count, FLAT_IN_WORDS.get(why, why)) for why, count in most_first]
        told = parts[0][1] if len(parts) == 1 else ", ".join(f"in {count} {words}" for count, words in parts)
        found.append(f"{sum(flat.values())} of {groups} groups have no gradient: {told}")
    if status.exchange.starved:
        found.append(status.exchange.starved)
    if status.checkpoint.error:
        found.append(status.checkpoint.error)
    return found


def helping(status: NodeStatus) -> PageVerdict:
    """Returns whether others help, and how many do."""
    peers, training = status.network.peers, status.training
    authors = len(status.exchange.trained)
    who = f"{peers} {'peer' if peers == 1 else 'peers'}, learnt from {authors}"
    if status.network.state == "off":
        return PageVerdict("open", "alone", "this node does not take part in a swarm")
    if not peers and not authors:
        return PageVerdict("warn", "nobody yet", status.network.reach.text)
    if training.waiting:
        one = training.waiting == 1
        who += (
            f"; {training.waiting} {'waits until its' if one else 'wait until their'} answers agree with ours"
        )
    if training.teaching:
        tone: Tone = "good" if training.book_foreign else "open"
        return PageVerdict(tone, f"{training.teaching} may teach", who)
    return PageVerdict("open", "all wait" if training.waiting else "not measured", who)


def pace(status: NodeStatus) -> PageVerdict:
    """Returns what takes most of the time, by the phases that are remembered."""
    seconds: dict[str, float] = {}
    phases = (*status.earlier, status.phase)
    for phase, after in pairwise(phases):
        seconds[phase.name] = seconds.get(phase.name, 0.0) + max(0.0, after.since - phase.since)
    for idle in ("starting", "paused", "stopped"):
        seconds.pop(idle, None)
    total = sum(seconds.values())
    speed = status.speed
    told = "" if speed.round_s is None else f"a round takes {speed.round_s:.2f} s"
    if speed.tokens_per_s is not None:
        told += f", {speed.tokens_per_s:,.0f} tokens/s"
    if not total:
        return PageVerdict("open", status.phase.name, told or "no round is done yet")
    slowest = max(seconds, key=lambda name: seconds[name])
    return PageVerdict("open", f"{slowest} {seconds[slowest] / total:.0%}", told)


def nats(gap: float) -> str:
    """Returns a difference of log-probabilities in words.

    >>> nats(0.0031), nats(2e-7)
    ('0.0031 nats', 'less than 0.0001 nats')
    """
    return "less than 0.0001 nats" if gap < 0.0001 else f"{gap:.4f} nats"


def sampler(status: NodeStatus, rounds: Sequence[RoundRewards]) -> PageVerdict:
    """Returns whether the engine samples what the trainer trains.

    Both compute the log-probability of the same tokens with the same policy. A difference that is large, or
    that grows with every version, is no arithmetic: the engine runs an old policy.
    """
    gap = status.training.engine_gap
    if gap is None:
        return PageVerdict(
            "open", "not measured", "no token of the newest policy version was in the last round"
        )
    early = [one.engine_gap for one in rounds if one.engine_gap is not None][:FIRST_ROUNDS]
    told = f"mean difference of {nats(gap)} per token"
    at_first = fmean(early) if early else gap
    if gap > AGREE_NATS and gap > GROWN * at_first and status.progress.policy_version > FIRST_ROUNDS:
        return PageVerdict(
            "bad",
            "the engine runs an old policy",
            f"SamplerLagsBehind: {told}, {nats(at_first)} in the first rounds: new versions do not reach it",
        )
    if gap > DISAGREE_NATS:
        return PageVerdict(
            "bad",
            "sampler and trainer disagree",
            f"SamplerDisagrees: {told}: it uses a different policy or different arithmetic",
        )
    if gap > AGREE_NATS:
        return PageVerdict("warn", "sampler and trainer differ", told)
    return PageVerdict("good", "sampler and trainer agree", told)
