"""Episodes between two turns, until they are scored.

environment_task.py -> put -> [LiveEpisodes] -> take -> the next turn, or the score
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

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
    _waiting: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict[int, _Waiting])
    _at: dict[EpisodeKey, list[int]] = field(default_factory=dict[EpisodeKey, list[int]])
    _serial: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, place: EpisodeKey, observed: tuple[Message, ...], episode: Episode) -> None:
        """Keeps an episode. `observed`: its last answer."""
        now = self.clock()
        if self.of_one_example and any(one.place[0] != place[0] for one in islice(self._waiting.values(), 1)):
            self.end_all()
        self._serial += 1
        self._waiting[self._serial] = _Waiting(place, observed, episode, now)
        self._at.setdefault(place, []).append(self._serial)
        while len(self._waiting) > MAX_LIVE or next(iter(self._waiting.values())).since < now - MAX_WAIT_S:
            close(self._pop(next(iter(self._waiting))).episode)

    def take(self, place: EpisodeKey, observed: tuple[Message, ...] = ()) -> Episode | None:
        """Returns an episode at this point with this last answer, or with any if the answer is not known."""
        for serial in self._at.get(place, ()):
            if not observed or self._waiting[serial].observed == observed:
                return self._pop(serial).episode
        return None

    def end_all(self) -> None:
        """Lets go of every episode."""
        while self._waiting:
            close(self._pop(next(iter(self._waiting))).episode)

    def _pop(self, serial: int) -> _Waiting:
        waiting = self._waiting.pop(serial)
        serials = self._at[waiting.place]
        serials.remove(serial)
        if not serials:
            del self._at[waiting.place]
        return waiting


def place_of(key: object, turns: Sequence[Turn]) -> EpisodeKey:
    """Returns the key of an episode."""
    told = [(turn.said, [(one["role"], one["content"]) for one in turn.observed]) for turn in turns]
    return key, hashlib.blake2b(repr(told).encode(), digest_size=16).digest()
