"""The node's next action, decided from a view of its state: pure, so one line tests each branch.

node.py asks [next_action] after everything it does, and does what it says.
"""

from dataclasses import dataclass

LONGEST_WAIT_S = 60.0
"""Longest wait for peers before round 1."""


@dataclass(frozen=True, slots=True)
class View:
    """All that the decision depends on. Rounds count from 1; round 0 is the state before the first."""

    round: int
    begun_at: int
    """The round that this start began at; more than 0 if it resumed."""
    rounds_limit: int | None
    stopping: bool
    evaluated_round: int | None
    saved_round: int | None
    """Last round with a written or failed checkpoint: a full disk is not tried again at once."""
    saved_evaluation: int | None
    """Round of the newest evaluation that this checkpoint contains."""
    eval_every: int
    checkpoint_every: int
    peers: int
    """Connected peers, without those of this process."""
    peers_wanted: int
    """Peers to wait for before round 1."""
    waited_s: float
    paused: bool = False
    rest_left_s: float = 0.0
    """Rest left before the next round, by limits.power."""

    @property
    def done(self) -> bool:
        return self.rounds_limit is not None and self.round >= self.rounds_limit


@dataclass(frozen=True, slots=True)
class WaitForPeers:
    missing: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    pass


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    pass


@dataclass(frozen=True, slots=True)
class Pause:
    pass


@dataclass(frozen=True, slots=True)
class Rest:
    seconds: float


@dataclass(frozen=True, slots=True)
class RunRound:
    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    reason: str


Action = WaitForPeers | Evaluate | SaveCheckpoint | Pause | Rest | RunRound | Stop


def next_action(view: View) -> Action:
    """Returns the node's next action: its whole behaviour in one expression.

    >>> next_action(View(3, 0, 3, False, 3, 3, 3, 0, 10, 0, 0, 0.0, 60.0))
    Stop(reason='3 rounds are done')
    """
    return (
        _stop(view)
        or _wait_for_peers(view)
        or _evaluate(view)
        or _save(view)
        or _finish(view)
        or _pause(view)
        or _rest(view)
        or RunRound(view.round + 1)
    )


def _stop(view: View) -> Action | None:
    if not view.stopping:
        return None
    return SaveCheckpoint() if _unsaved(view) else Stop("stopped on request")


def _wait_for_peers(view: View) -> Action | None:
    missing = view.peers_wanted - view.peers
    waits = view.round == 0 and missing > 0 and view.waited_s < LONGEST_WAIT_S
    return WaitForPeers(missing) if waits else None


def _evaluate(view: View) -> Action | None:
    """Evaluate when a run, or other tasks in it, begin, at the end, and every `eval_every` rounds; each round
    only once."""
    if view.evaluated_round == view.round:
        return None
    due = view.eval_every and view.round % view.eval_every == 0
    first = view.evaluated_round is None
    return Evaluate() if first or due or view.done else None


def _save(view: View) -> Action | None:
    """Save when due, at the end, and after each evaluation, since this policy may be the best."""
    due = view.round % view.checkpoint_every == 0 or view.evaluated_round == view.round
    return SaveCheckpoint() if _unsaved(view) and (due or view.done) else None


def _finish(view: View) -> Action | None:
    if not view.done:
        return None
    if view.round == view.begun_at > 0:
        return Stop(
            f"nothing to do: {view.round} of {view.rounds_limit} rounds are done; raise --rounds"
            " (rounds=) or start over (--fresh, fresh=True)"
        )
    return Stop(rounds_done(view.round))


def rounds_done(rounds: int) -> str:
    """Returns the number of rounds that are done, in words.

    >>> rounds_done(1), rounds_done(2)
    ('1 round is done', '2 rounds are done')
    """
    return "1 round is done" if rounds == 1 else f"{rounds} rounds are done"


def _pause(view: View) -> Action | None:
    """Pause between two rounds, after a checkpoint, since a pause may last."""
    if not view.paused:
        return None
    return SaveCheckpoint() if _unsaved(view) else Pause()


def _rest(view: View) -> Action | None:
    return Rest(view.rest_left_s) if view.rest_left_s > 0 else None


def rest_after(round_s: float, power: float) -> float:
    """Returns the seconds to rest after a round, so that rounds take the share `power` of the time.

    >>> rest_after(3.0, 0.25), rest_after(3.0, 1.0)
    (9.0, 0.0)
    """
    return round_s * (1 - power) / power


def _unsaved(view: View) -> bool:
    """Returns True if the newest checkpoint lacks the last round, or its evaluation (after a resume)."""
    evaluated = view.evaluated_round == view.round != view.saved_evaluation
    return view.round > 0 and (view.saved_round != view.round or evaluated)
