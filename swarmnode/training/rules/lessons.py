"""The lessons that a rule draws from a round: groups with their credit, and answers to replay.

node (own and external groups) -> [Rule.lessons] -> [Lessons] -> round.py -> trainer
                                       |
                                       +-> Rule.state -> [pack, unpack] -> checkpoint.py (rule.bin)

`Rule` is the base of every rule; rules.py lists them by name. A rule's state is saved as bytes under the
rule's name. No torch here.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.errors import CheckpointError
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.book import Entry, Mend
from swarmnode.training.rules.teachers import Compare
from swarmnode.types import ExampleKey, RolloutGroup

logger = logging.getLogger(__name__)

FORMAT = 1

MAX_STATE_BYTES = 512 * 1024 * 1024
"""The most bytes of a whole state. A book of 2000 answers of 512 tokens takes some 6 MiB."""

MAX_NAME = 256
"""The most characters of a rule's name, which may be an import path."""

State = TypeVar("State", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class GroupLesson:
    """One group, and which part of it is learned from."""

    group: RolloutGroup
    advantages: tuple[float | None, ...] | None = None
    """The advantage of each completion, in place of the one from its rewards; None at a place leaves that
    completion out. None: the group's own advantages (losses.py)."""
    gains_only: bool = False
    """Only completions that are better than the group's mean are learned from."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One answer of the book, to be learned from again."""

    entry: Entry
    advantage: float
    ends: bool
    """Our end of text follows if there is room for it."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """Everything that one round trains on."""

    own: tuple[GroupLesson, ...]
    external: tuple[GroupLesson, ...]
    replayed: tuple[Replay, ...] = ()
    replay_steps: int = 1
    """The fewest optimizer steps over which replayed answers are spread."""
    shaped: bool = False
    """Tokens without a log-probability recorded by one of our policies are weighted by
    `token_weights.shaped_weights`."""
    report: TrainReport = field(default_factory=TrainReport)
    """The rule's part of the round's report: its book, authors and running pass rates."""


@dataclass(frozen=True, slots=True)
class SharingRule:
    """A rule name for `exchange.rule`, and its settings. The defaults are the recipe that was measured."""

    name: str = "book"
    book_size: int = 2000
    """The most answers that the book holds."""
    book_replayed: int = 128
    """M: answers of the book that a round trains on, in addition to its groups."""
    book_foreign: int = 64
    """The most of them that others found, except in a node that catches up. More teach hardly anything more,
    and our own finds beside them keep liars from deciding what is learnt."""
    step_answers: int = 64
    """Replayed answers that fill an optimizer step: a round has at least as many steps as they fill, however
    few its own answers are."""
    book_weight: float = 4.0
    """Lambda: the advantage of a replayed answer. The only right answer in a group of 8 has 2.6."""
    shaped: bool = False
    """Weight tokens that strangers wrote, and replayed ones, as LUFFY does (token_weights.py)."""
    teach_ends: bool = True
    """Teach our end of text behind a stranger's answer that our own judge gave full marks (book_rule.py).
    False: teach only ends that our own policies sampled."""
    answers_per_example: int = 4
    """The most distinct answers of one example in the book."""


class Rule(ABC):
    """A way to learn from a round of own and external groups. Only one thread calls it at a time.

    To write your own, subclass this in any importable module and set `exchange.rule = "mymodule:Mine"`
    (configs/README.md). Implement `lessons`, and override whatever else differs.
    """

    keeps_own: bool = False
    """External groups do not displace own ones: `lessons` gets all own groups of a round, including those
    without a gradient."""
    fetches: bool = True
    """Foreign groups are fetched."""
    keeps_answers: bool = False
    """Right answers of others are kept and replayed: the rule can use the swarm's library."""
    mends: bool = True
    """Before they are kept, strangers' right answers are cut to what our judge and the rest of the text need;
    inserted text is removed."""
    measures_teachers: bool = True
    """An author's answers wait until their gradients agree with those of our own finds. False: everybody
    whose answers our judge gives full marks may teach."""
    replayed: int | None = None
    """Number of answers that a round replays, in place of the setting; any of them may be others'. None: as
    set."""
    step_answers: int | None = None
    """Replayed answers per optimizer step, in place of the setting. None: as set."""

    def __init__(
        self,
        settings: SharingRule = SharingRule(),
        seed: int = 0,
        mend: Mend | None = None,
    ) -> None:
        """`mend`: applied to each round's foreign answers before they are kept. None: they are kept
        unchanged."""
        self._settings = settings
        self._seed = seed
        self._mend = mend if self.mends else None

    @abstractmethod
    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
    ) -> Lessons:
        """Returns the lessons to train on. `version`: our policy's version. Equal calls return equal
        lessons."""

    def demonstrate(self, groups: Sequence[RolloutGroup]) -> bool:
        """Takes answers that somebody wrote for us, scored by our judge. Returns False if the rule does not
        keep them."""
        return False

    def measure_by(self, compare: Compare) -> None:  # noqa: B027 - optional
        """Has foreign answers compared with what we found ourselves before they are learnt."""

    def state(self) -> bytes:
        """Returns the rule's memory, for a checkpoint (`pack`)."""
        return b""

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> int | None:
        """Restores what `state` returned; does nothing without bytes, or with those of another rule. `tasks`:
        versions by name; answers to other tasks are forgotten (None: none are). Returns the number of
        forgotten answers if the rule counts them. Raises CheckpointError."""
        return None

    def origins(self) -> Mapping[tuple[str, ExampleKey], int]:
        """Returns the number of kept answers by author and example."""
        return {}

    def forget_strangers(self, tasks: Collection[str]) -> None:  # noqa: B027 - optional
        """Forgets others' answers to these tasks, which are not exchanged (any more)."""


def as_they_are(groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
    """Returns lessons that use the advantages from the groups' rewards."""
    return tuple(GroupLesson(group) for group in groups)


def pack(rule: str, state: msgspec.Struct) -> bytes:
    """Returns a rule's state as bytes for `unpack`; no bytes if the state is too large for `unpack` to
    read."""
    raw = msgspec.Raw(msgspec.msgpack.encode(state))
    data = msgspec.msgpack.encode(_Packed(FORMAT, rule, raw))
    if len(data) <= MAX_STATE_BYTES:
        return data
    logger.warning(
        "state of rule %s (%d bytes) exceeds the checkpoint limit (%d) and is not saved",
        rule,
        len(data),
        MAX_STATE_BYTES,
    )
    return b""


def unpack(data: bytes, rule: str, kind: type[State]) -> State | None:
    """Returns the state that `pack` was given; None for no bytes or the state of another rule. Raises
    CheckpointError if the bytes are not a valid state."""
    if not data:
        return None
    try:
        if len(data) > MAX_STATE_BYTES:
            raise msgspec.ValidationError(f"{len(data)} bytes, at most {MAX_STATE_BYTES}")
        packed = msgspec.msgpack.decode(data, type=_Packed)
        if packed.rule != rule:
            logger.info("exchange.rule is now %s, was %s: it starts with no state", rule, packed.rule)
            return None
        if packed.format != FORMAT:
            raise msgspec.ValidationError(f"format {packed.format}, this version reads {FORMAT}")
        return msgspec.msgpack.decode(packed.state, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read the state of exchange.rule={rule}: {error}", hint="use --fresh"
        ) from error


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    rule: Annotated[str, Meta(max_length=MAX_NAME)]
    state: msgspec.Raw
