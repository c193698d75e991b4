"""The stories of the nodes of a local swarm: what they knew, what they learnt, how they do alone.

metrics.jsonl of each node -> [NodeStory] -> local_swarm.py (results, lines)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from swarmnode.extensions.page.reward_history import RewardHistory
from swarmnode.node.showing.figures import figure, sparkline

KNOWN = 0.3
"""Held-out reward from which on a task counts as one that a node knew at first."""

RISE = 0.15
"""Gain in held-out reward that counts as learnt. With 64 examples a task, its error is 0.06."""

CURVE_COLUMNS = 30


@dataclass(frozen=True, slots=True)
class NodeStory:
    """One node's run, as its metrics tell it. What did not happen yet is empty or None."""

    rewards: tuple[float, ...] = ()
    """Mean reward of the answers it sampled, round by round."""
    tasks_first: Mapping[str, float] = field(default_factory=dict[str, float])
    """Held-out reward by task before round 1."""
    tasks_last: Mapping[str, float] = field(default_factory=dict[str, float])
    """Held-out reward by task at the newest evaluation."""
    held_out: float | None = None
    """The mean of these."""
    replayed_from_others: int = 0
    """Verified right answers of others that it holds, to learn from."""

    @property
    def knew(self) -> list[str]:
        """Tasks that it answered well from the start, the best first."""
        first = self.tasks_first
        return sorted((task for task in first if first[task] >= KNOWN), key=lambda task: -first[task])

    @property
    def learnt(self) -> dict[str, tuple[float, float]]:
        """Tasks that it did not know and on which it rose: at first and now, the largest gain first."""
        first, last = self.tasks_first, self.tasks_last
        gains = {
            task: (first[task], last[task])
            for task in first
            if task in last and first[task] < KNOWN and last[task] - first[task] >= RISE
        }
        return dict(sorted(gains.items(), key=lambda item: item[1][0] - item[1][1]))


def read_story(logs: Path, run: str) -> NodeStory:
    """Returns the story of a run of a node that has ended; an empty one of one that wrote nothing."""
    history = RewardHistory(logs, run)
    history.read()
    newest = history.newest or {}
    evaluations = [one.tasks for one in history.evaluations if one.tasks] or [{}]
    return NodeStory(
        rewards=tuple(one.own for one in history.rounds if one.own is not None),
        tasks_first=evaluations[0],
        tasks_last=evaluations[-1],
        held_out=newest.get("reward.eval_last"),
        replayed_from_others=int(newest.get("training.book_foreign", 0)),
    )


def lines_of(name: str, story: NodeStory, alone: NodeStory | None) -> list[str]:
    """Returns the lines that tell a newcomer of one node. `alone`: that node without the others."""
    curves = curves_of([story.rewards] if alone is None else [story.rewards, alone.rewards])
    knew = ", ".join(story.knew) or "nothing well"
    lines = [f"{name} knew {knew}", f"  in the swarm  {curves[0]}  held out {figure(story.held_out, '.2f')}"]
    if alone is not None:
        lines.append(f"  alone         {curves[1]}  held out {figure(alone.held_out, '.2f')}")
    elsewhere = dict[str, float]() if alone is None else alone.tasks_last
    gains = [
        f"{task} {before:.2f} -> {now:.2f}" + (f" ({elsewhere[task]:.2f} alone)" if task in elsewhere else "")
        for task, (before, now) in story.learnt.items()
    ]
    if gains:
        source = f", with {story.replayed_from_others} right answers of others"
        lines.append(f"  learnt {', '.join(gains)}{source if story.replayed_from_others else ''}")
    return lines


def curves_of(series: Sequence[Sequence[float]]) -> list[str]:
    """Curves in characters, on one common scale.

    >>> curves_of([[0.0, 1.0], [0.0, 0.5]])
    ['▁█', '▁▄']
    """
    every = [value for one in series for value in one]
    if not every:
        return ["" for _ in series]
    ends = [min(every), max(every)]
    return [sparkline([*ends, *_shortened(one)])[len(ends) :] for one in series]


def _shortened(values: Sequence[float]) -> list[float]:
    """The values as at most CURVE_COLUMNS means of neighbours."""
    count = min(len(values), CURVE_COLUMNS)
    cuts = [len(values) * place // count for place in range(count + 1)] if count else [0]
    return [fmean(values[start:end]) for start, end in pairwise(cuts)]
