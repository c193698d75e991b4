"""The lessons that a rule makes of a round: groups with their credit, and answers that are replayed.

node (own and external groups) -> [Rule.lessons] -> [Lessons] -> round.py -> trainer
                                       |
                                       +-> Rule.state -> [pack, unpack] -> checkpoint.py (rule.bin)

`Rule` is what every rule is; rules.py has them by name. A rule's state is bytes under the name of the rule
that it is of. No torch here.
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
"""A whole state. A book of 2000 answers of 512 tokens takes some 6 MiB."""

MAX_NAME = 256
"""Characters of a rule's name, which may be an import path."""

State = TypeVar("State", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class GroupLesson:
    """One group, and what of it is learned from."""

    group: RolloutGroup
    advantages: tuple[float | None, ...] | None = None
    """The advantage of each completion, in place of those that its rewards give; None at a place: it is left
    out. None: those of the group (losses.py)."""
    gains_only: bool = False
    """Only completions that are better than their group are learned from."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One answer of the book, to be learned from again."""

    entry: Entry
    advantage: float
    ends: bool
    """Our end of text follows where there is room for it."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """Everything that one round trains on."""

    own: tuple[GroupLesson, ...]
    external: tuple[GroupLesson, ...]
    replayed: tuple[Replay, ...] = ()
    replay_steps: int = 1
    """The fewest optimizer steps that what is replayed is spread over."""
    shaped: bool = False
    """Tokens that no policy of ours was recorded to sample are weighed by `token_weights.shaped_weights`."""
    report: TrainReport = field(default_factory=TrainReport)
    """The rule's part of the round's report: of its book, of authors, of running pass rates."""


@dataclass(frozen=True, slots=True)
class SharingRule:
    """A rule by its name in `exchange.rule`, and its settings. Defaults are the recipe that was measured."""

    name: str = "book"
    book_size: int = 2000
    """Answers that the book holds."""
    book_replayed: int = 64
    """M: answers of the book that a round trains on, besides its groups."""
    book_weight: float = 4.0
    """Lambda: the advantage of a replayed answer. One right answer of a group of 8 has 2.6."""
    shaped: bool = False
    """Weigh tokens that strangers wrote, and replayed ones, as LUFFY does (token_weights.py)."""
    teach_ends: bool = True
    """Teach our end of text behind a stranger's answer that our own judge gave full marks (book_rule.py).
    False: only ends that our own policies sampled."""
    answers_per_example: int = 4
    """Distinct answers of one example in the book."""


class Rule(ABC):
    """A way to learn from a round of own and external groups. One thread calls at a time.

    One of one's own is a subclass in any module that can be imported, `exchange.rule = "mymodule:Mine"`
    (configs/README.md): it needs `lessons`, and whatever of the rest is not as it stands here.
    """

    keeps_own: bool = False
    """Own groups are not displaced by external ones: `lessons` is given all of a round, those without a
    gradient among them."""
    fetches: bool = True
    """Groups of others are wanted at all."""
    keeps_answers: bool = False
    """Right answers of others are kept and replayed: the rule has use for the swarm's library."""
    mends: bool = True
    """Right answers of strangers are cut to what our judge and the rest of the text need, before they are
    kept: text that was put in goes."""
    measures_teachers: bool = True
    """An author's answers wait until their gradients agree with those of our own finds. False: everybody with
    answers that our judge gives full marks may teach."""
    replayed: int | None = None
    """Answers that a round replays, in place of the setting. None: as it is set."""
    step_answers: int | None = None
    """Replayed answers that an optimizer step has. None: they stand in the steps of the own groups."""

    def __init__(
        self,
        settings: SharingRule = SharingRule(),
        seed: int = 0,
        mend: Mend | None = None,
    ) -> None:
        """`mend`: what single foreign answers go through before they are kept; None: they are taken as they
        are."""
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
        """Returns the lessons to train on. `version`: our policy's. The same calls give the same lessons."""

    def demonstrate(self, groups: Sequence[RolloutGroup]) -> bool:
        """Take up answers that somebody wrote for us, as our judge scored them. Returns False where the rule
        keeps none."""
        return False

    def measure_by(self, compare: Compare) -> None:  # noqa: B027 - optional
        """Have what others teach compared with what we found ourselves before it is learnt."""

    def state(self) -> bytes:
        """Returns the memory of the rule, for a checkpoint (`pack`)."""
        return b""

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> int | None:
        """Take up what `state` gave; nothing for no bytes or those of another rule. `tasks`: version by name;
        what belongs to others is forgotten. None: all is taken. Returns how many answers were forgotten,
        where a rule counts them. Raises CheckpointError."""
        return None

    def origins(self) -> Mapping[tuple[str, ExampleKey], int]:
        """Returns the number of answers that are kept of each author and example."""
        return {}

    def forget_strangers(self, tasks: Collection[str]) -> None:  # noqa: B027 - optional
        """Let go of what was kept of others' answers to these tasks, which are not exchanged (any more)."""


def as_they_are(groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
    """Groups to be learned from with the advantages that their rewards give."""
    return tuple(GroupLesson(group) for group in groups)


def pack(rule: str, state: msgspec.Struct) -> bytes:
    """The state of a rule, for `unpack`. Nothing where that would not read it, for want of a bound."""
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
    CheckpointError if the bytes are no such state."""
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
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot read the state of exchange.rule={rule}: {error}", hint="use --fresh"
        ) from error


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    rule: Annotated[str, Meta(max_length=MAX_NAME)]
    state: msgspec.Raw
