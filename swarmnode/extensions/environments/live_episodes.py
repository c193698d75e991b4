"""Episodes between two turns, until they are scored.

environment_task.py -> put -> [LiveEpisodes] -> take -> the next turn, or the score
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnode.chat import Message, Turn
from swarmnode.extensions.environments.episodes import Episode, close

MAX_LIVE = 2048
"""Most episodes that wait for the policy's next turn; the oldest are given up for new ones."""

MAX_WAIT_S = 3600.0
"""Longest that an episode waits for its next turn or for its score, in seconds."""


# ---- episodes between two turns ----

EpisodeKey = tuple[object, bytes]
"""Key of an episode: the example, and a digest of its turns before the environment's last answer."""


@dataclass(slots=True)
class _Waiting:
    place: EpisodeKey
    observed: tuple[Message, ...]
    episode: Episode
    since: float


@dataclass(slots=True)
class LiveEpisodes:
    """Episodes that wait for the next turn, found by their turns. Two that came to the same point are
    interchangeable."""

    clock: Callable[[], float] = time.monotonic
    of_one_example: bool = False
    """True if the first episode of another example ends all of the one before: nobody comes back to a
    stranger's."""
    _waiting: list[_Waiting] = field(default_factory=list[_Waiting])
    """Episodes that wait, the one that has waited longest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, place: EpisodeKey, observed: tuple[Message, ...], episode: Episode) -> None:
        """Keeps an episode. `observed`: its last answer."""
        now = self.clock()
        if self.of_one_example and self._waiting and self._waiting[0].place[0] != place[0]:
            self.end_all()
        self._waiting.append(_Waiting(place, observed, episode, now))
        while len(self._waiting) > MAX_LIVE or self._waiting[0].since < now - MAX_WAIT_S:
            close(self._waiting.pop(0).episode.environment)

    def take(self, place: EpisodeKey, observed: tuple[Message, ...] = ()) -> Episode | None:
        """Returns an episode at this point with this last answer, or with any if the answer is not known."""
        for number, one in enumerate(self._waiting):
            if one.place == place and (not observed or one.observed == observed):
                return self._waiting.pop(number).episode
        return None

    def end_all(self) -> None:
        """Lets go of every episode."""
        while self._waiting:
            close(self._waiting.pop(0).episode.environment)


def place_of(key: object, turns: Sequence[Turn]) -> EpisodeKey:
    """Returns the key of an episode."""
    told = [(turn.said, [(one["role"], one["content"]) for one in turn.observed]) for turn in turns]
    return key, hashlib.blake2b(repr(told).encode(), digest_size=16).digest()
