"""Micro-batches of text for a data node: warm-up, and fine-tuning on plain files.

folder or strings -> tokenizer -> [TextSource: equal sequences] -> [TextFeed] -> iteration_driver.py

All documents, each with an end token behind it, make one row of tokens, which is cut into sequences of equal
length. Which of them a micro-batch holds is decided by its name alone: seed, data node, iteration, agent and
wave. So a micro-batch that is started again has the same tokens, no two data nodes need to agree on who reads
what, and a pipeline that was planned anew goes on without a place in the text to be kept.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, Objective, cross_entropy
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.training.packing import MicroBatch, TrainingSample, micro_batches

MAX_TEXT_BYTES = 512 * 1024 * 1024
"""Bound of the text of a folder. A token takes four bytes, and all of them stay in memory: more text needs a
data set that is read piece by piece."""

Encode = Callable[[str], Sequence[int]]
"""Encodes a document as token ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Sizes of sequences and micro-batches of text."""

    sequence_tokens: int = 1024
    """Tokens of a sequence; all but the first are predicted."""
    batch_sequences: int = 8
    """Sequences of a micro-batch."""
    seed: int = 0


class TextSource:
    """Sequences of equal length.

    >>> source = TextSource(["ab" * 40], lambda text: list(text.encode()), 0, TextSettings(9, 2))
    >>> source.sequences
    9
    >>> source.batch("this node", iteration=0, agent=0, wave=0).input_ids_BT.shape
    torch.Size([2, 9])
    """

    def __init__(
        self,
        documents: Iterable[str],
        encode: Encode,
        end_token_id: int,
        settings: TextSettings,
        *,
        device: torch.device | None = None,
        packed: bool = False,
        named: str = "the text",
    ) -> None:
        """`packed`: the model takes packed rows (StageModel.packs). `named`: name of the text in errors.
        Raises ConfigError if the text is empty or too short."""
        self.settings = settings
        self._device = device or torch.device("cpu")
        self._packed = packed
        self._tokens = array("i")
        for document in documents:
            if document:
                self._tokens.extend(encode(document))
                self._tokens.append(end_token_id)
        self._learned: Sequence[int] = range(len(self._tokens) // settings.sequence_tokens)
        """Numbers of the sequences that are learned from."""
        if len(self._learned) < settings.batch_sequences:
            raise ConfigError(
                f"{named} has {len(self._tokens)} tokens, which are {len(self._learned)} sequences of "
                f"{settings.sequence_tokens}; a micro-batch needs {settings.batch_sequences}",
                hint="use more text, shorter sequences, or fewer sequences per micro-batch",
            )

    @classmethod
    def read(
        cls, folder: Path, tokenizer: Any, settings: TextSettings, *, device: torch.device, packed: bool
    ) -> "TextSource":
        """Read all files of a folder and its subfolders, or one file, through a model's own tokenizer.

        Hidden files are left out; all others must be text in UTF-8. Raises ConfigError if there are none, if
        one cannot be read, or if they are too large or too short together.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError("this model's tokenizer has no end token", hint="choose another --model")

        def encode(text: str) -> Sequence[int]:
            # Verbose, it warns of documents longer than the model's context; our sequences are not.
            return tokenizer.encode(text, add_special_tokens=False, verbose=False)

        end, documents = int(tokenizer.eos_token_id), _documents(folder)
        return cls(documents, encode, end, settings, device=device, packed=packed, named=str(folder))

    @property
    def sequences(self) -> int:
        """Number of sequences that are learned from."""
        return len(self._learned)

    def batch(self, data_node: str, *, iteration: int, agent: int, wave: int) -> MicroBatch:
        """Return the micro-batch with this name, no sequence twice. Sequences occur again in other
        micro-batches by chance, as if drawn with replacement."""
        name = f"{self.settings.seed}/{data_node}/{iteration}/{agent}/{wave}"
        chance = Random(hashlib.sha256(name.encode()).digest())
        return self._batch(chance.sample(self._learned, self.settings.batch_sequences))

    def _sequence(self, number: int) -> "array[int]":
        length = self.settings.sequence_tokens
        return self._tokens[number * length : (number + 1) * length]

    def _batch(self, numbers: Sequence[int]) -> MicroBatch:
        samples = [_sample(self._sequence(number)) for number in numbers]
        room = len(samples) * self.settings.sequence_tokens
        # Equal lengths fill the room exactly, so they are one micro-batch, packed or not.
        (batch,) = micro_batches(samples, room, self._device, packed=self._packed)
        return batch


@dataclass(frozen=True, slots=True)
class TextFeed:
    """The text that one data node learns from in one iteration: a `Feed` of member_records.py.

    >>> source = TextSource(["ab" * 40], lambda text: list(text.encode()), 0, TextSettings(9, 2))
    >>> TextFeed(source, "this node", iteration=3).take(agent=0, wave=1, path=(0, 2)).tokens
    16
    """

    source: TextSource
    data_node: str
    """Peer id of the data node: data nodes with the same text learn from different parts of it."""
    iteration: int
    objective: Objective = field(default_factory=lambda: cross_entropy(1))
    """The loss, undivided: a stage divides its sum by the tokens that have really passed it."""

    def take(self, agent: int, wave: int, path: StagePath) -> LossInputs | None:
        """Return a micro-batch for this path, the same one whenever it is asked for. Text never runs out."""
        batch = self.source.batch(self.data_node, iteration=self.iteration, agent=agent, wave=wave)
        return LossInputs(batch, path)


def _sample(tokens: Sequence[int]) -> TrainingSample:
    """Return a sequence as a sample whose first token is the prompt: nothing before it could predict it."""
    return TrainingSample(
        prompt_ids=(tokens[0],),
        completion_ids=tuple(tokens[1:]),
        advantage=1.0,
        behaviour_logprobs=None,
        spans=(),
    )


def _documents(folder: Path) -> Iterator[str]:
    """Yield the texts of the files in the order of their names, so that it is the same wherever the folder
    lies."""
    left = MAX_TEXT_BYTES
    for file in [folder] if folder.is_file() else _files(folder):
        data = _read(file, left + 1)
        left -= len(data)
        if left < 0:
            raise ConfigError(
                f"the text in {folder} is larger than {MAX_TEXT_BYTES} bytes", hint="use only part of it"
            )
        try:
            yield data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{file} is not a text file: byte {error.start} is not UTF-8",
                hint="leave only text files in the folder",
            ) from error


def _read(file: Path, most_bytes: int) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(most_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read the text {file}: {error.strerror}") from error


def _files(folder: Path) -> list[Path]:
    try:
        found = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        exists = folder.is_dir()
    except OSError as error:
        raise ConfigError(f"cannot list the folder {folder}: {error.strerror}") from error
    if not found:
        raise ConfigError(
            f"there is no text in {folder}" if exists else f"there is no folder {folder}",
            hint="name a file, or a folder of text files in UTF-8",
        )
    return found
