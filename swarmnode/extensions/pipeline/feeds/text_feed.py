"""Micro-batches of text for a data node, for warm-up and for fine-tuning on plain files.

folder or strings -> tokenizer -> [TextSource: equal sequences] -> [TextFeed] -> iteration_driver.py

All documents, each followed by an end token, form one row of tokens, which is cut into sequences of equal
length. The name of a micro-batch alone determines its sequences: seed, data node, iteration, agent and wave.
So a micro-batch that is started again has the same tokens, data nodes need not agree on their shares of the
text, and a pipeline can continue under a new plan without recording a position in the text.
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
"""Limit on the text of a folder. Each token takes four bytes, and all of them stay in memory: more text needs
a data set that is read piece by piece."""

Encode = Callable[[str], Sequence[int]]
"""Encodes a document as token ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Sizes of sequences and micro-batches of text."""

    sequence_tokens: int = 1024
    """Tokens per sequence; all but the first are predicted."""
    batch_sequences: int = 8
    """Sequences per micro-batch."""
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
        """`packed`: the model accepts packed rows (StageModel.packs). `named`: name of the text in errors.
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
        """Read all files of a folder and its subfolders, or one file, with a model's own tokenizer.

        Hidden files are skipped; all others must be UTF-8 text. Raises ConfigError if there are none, if one
        cannot be read, or if the total is too large or too short.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError("this model's tokenizer has no end token", hint="choose another --model")

        def encode(text: str) -> Sequence[int]:
            # With verbose=True, it warns about documents longer than the model's context.
            return tokenizer.encode(text, add_special_tokens=False, verbose=False)

        end, documents = int(tokenizer.eos_token_id), _documents(folder)
        return cls(documents, encode, end, settings, device=device, packed=packed, named=str(folder))

    @property
    def sequences(self) -> int:
        """Number of sequences that are learned from."""
        return len(self._learned)

    def batch(self, data_node: str, *, iteration: int, agent: int, wave: int) -> MicroBatch:
        """Return the micro-batch with this name, with no sequence twice. Other micro-batches may contain the
        same sequences by chance, as if drawn with replacement."""
        name = f"{self.settings.seed}/{data_node}/{iteration}/{agent}/{wave}"
        chance = Random(hashlib.sha256(name.encode()).digest())
        return self._batch(chance.sample(self._learned, self.settings.batch_sequences))

    def _sequence(self, number: int) -> "array[int]":
        length = self.settings.sequence_tokens
        return self._tokens[number * length : (number + 1) * length]

    def _batch(self, numbers: Sequence[int]) -> MicroBatch:
        samples = [_sample(self._sequence(number)) for number in numbers]
        room = len(samples) * self.settings.sequence_tokens
        # Sequences of equal length fill the room exactly, so they form one micro-batch, packed or not.
        (batch,) = micro_batches(samples, room, self._device, packed=self._packed)
        return batch


@dataclass(frozen=True, slots=True)
class TextFeed:
    """The text that one data node learns from in one iteration: a `Feed` (see member_records.py).

    >>> source = TextSource(["ab" * 40], lambda text: list(text.encode()), 0, TextSettings(9, 2))
    >>> TextFeed(source, "this node", iteration=3).take(agent=0, wave=1, path=(0, 2)).tokens
    16
    """

    source: TextSource
    data_node: str
    """Peer id of the data node. Data nodes with the same text learn from different parts of it."""
    iteration: int
    objective: Objective = field(default_factory=lambda: cross_entropy(1))
    """The loss, undivided: a stage divides its sum by the tokens that passed it."""

    def take(self, agent: int, wave: int, path: StagePath) -> LossInputs | None:
        """Return a micro-batch for this path, the same one on every call. Text never runs out."""
        batch = self.source.batch(self.data_node, iteration=self.iteration, agent=agent, wave=wave)
        return LossInputs(batch, path)


def _sample(tokens: Sequence[int]) -> TrainingSample:
    """Return a sequence as a sample whose prompt is its first token, which nothing could predict."""
    return TrainingSample(
        prompt_ids=(tokens[0],),
        completion_ids=tuple(tokens[1:]),
        advantage=1.0,
        behaviour_logprobs=None,
        spans=(),
    )


def _documents(folder: Path) -> Iterator[str]:
    """Yield the texts of the files in order of their names, so that the result does not depend on the
    folder's location."""
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
