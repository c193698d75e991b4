"""Episodes of strangers, played again: their policy's words, and our own environment's replies.

Answer.text, turn by turn -> [EpisodeReader.read] -> task.observe (in the strangers' process) -> Completion
  -> body_check.py

The observations of a stranger's environment do not travel and are never read. An episode that does not end
where its author's did is dropped: it has turns after our environment's end, or stops before that end without
having used all the turns that there are. One that is too long for us is not played on. Token ids are ours,
and so are the stretches of them that are not trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnode.chat import Turn
from swarmnode.errors import Rejected, TaskError
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.limits import MAX_CHARS_PER_TOKEN, PLAY_S
from swarmnode.exchange.messages import Answer
from swarmnode.tasks.task import Environment
from swarmnode.types import Completion, Example, FinishReason, Stretch, one_span

EncodeTurns = Callable[[Sequence[Turn], FinishReason], tuple[tuple[int, ...], tuple[Stretch, ...]]]
"""The local policy's tokens of an episode, and the stretches of them that the environment wrote."""


@dataclass(slots=True)
class EpisodeReader:
    """The answers to one example, played one after the other."""

    task: Environment
    example: Example
    policy_version: int
    encode_turns: EncodeTurns
    max_tokens: int
    clock: Callable[[], float]
    refusal: Reason = Reason.UNFINISHED
    """The reason why episodes were dropped: UNFINISHED, until one is dropped for a reason that its author's
    own limit of turns does not explain."""
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def read(self, answers: Sequence[Answer]) -> list[Completion | None]:
        """Returns the answers in our tokens, as many as there was time for, with None for those that are
        dropped. Raises Rejected, JudgementLost."""
        played: list[Completion | None] = []
        for answer in answers:
            if not isinstance(answer.text, tuple):
                raise Rejected(Reason.MALFORMED_BODY, "an environment's answer without turns")
            turns = self._turns(answer.text)
            if turns is None:
                break
            played.append(self._completion(turns))
        if not played:
            raise Rejected(Reason.PLAY_TIMEOUT, f"no episode ended within {PLAY_S:g} s")
        return played

    def _turns(self, saids: Sequence[str]) -> tuple[Turn, ...] | None:
        """Returns the episode. (): it ends elsewhere or is too long. None: there was no time."""
        turns: list[Turn] = []
        most = self.task.most_turns
        left = sum(map(len, saids))
        for said in saids[:most]:
            if self._is_too_long(turns, left):
                return self._refuse(Reason.TOO_LONG)
            if len(turns) + 1 == most:
                turns.append(Turn(said))  # Nothing replies to it, as in its author's environment.
                break
            left -= len(said)
            if self.clock() - self._began > PLAY_S:
                return None
            observed = self._observed([*turns, Turn(said)])
            turns.append(Turn(said, observed or ()))
            if observed is None:
                break
        if len(turns) < len(saids):
            return self._refuse(Reason.UNPLAYABLE)
        if turns[-1].observed:
            return ()
        return (*turns[:-1], Turn(saids[-1]))

    def _observed(self, turns: Sequence[Turn]) -> "tuple[dict[str, str], ...] | None":
        try:
            return self.task.observe(self.example, turns)
        except TaskError as error:
            raise Rejected(Reason.UNSCORABLE, error.message) from error

    def _is_too_long(self, turns: Sequence[Turn], left: int) -> bool:
        """Returns True if an episode can no longer fit, with `left` characters still to be said."""
        if not self._may_fit(_characters(turns) + left):
            return True
        return bool(turns) and len(self.encode_turns(turns, "length")[0]) > self.max_tokens

    def _refuse(self, reason: Reason) -> tuple[Turn, ...]:
        self.refusal = reason
        return ()

    def _completion(self, turns: tuple[Turn, ...]) -> Completion | None:
        if not turns:
            return None
        fits = self._may_fit(_characters(turns))
        # "length": nobody knows whether the author's policy ended its last turn (body_check.py).
        token_ids, given = self.encode_turns(turns, "length") if fits else (None, ())
        if token_ids is None or len(token_ids) > self.max_tokens:
            self._refuse(Reason.TOO_LONG)
            return None
        spans = one_span(self.policy_version, len(token_ids))
        return Completion(turns, token_ids, None, spans, "length", given=given)

    def _may_fit(self, characters: int) -> bool:
        """Returns True if this much text could have few enough tokens, without counting them."""
        return characters <= self.max_tokens * MAX_CHARS_PER_TOKEN


def _characters(turns: Sequence[Turn]) -> int:
    return sum(len(turn.said) + sum(len(one["content"]) for one in turn.observed) for turn in turns)
