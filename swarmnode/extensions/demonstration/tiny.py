"""The tiny policy: a language model that any machine builds by itself in seconds, for want of a download.

recipe + built-in tasks -> [build_tiny] -> a folder that transformers, the embedded engine and vLLM load

About 100,000 parameters in Qwen3's architecture, bytes for tokens, warmed up on the eight built-in tasks
(`warmup.py`). A demonstration policy, honest about it: it answers `rev abc=` and knows nothing else.

The folder is cached under a digest of everything that made it, written aside and renamed, so that it is
either whole or absent, also when two processes build it at once. One that was damaged later is built anew.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swarmnode.errors import StorageError
from swarmnode.extensions.demonstration.warmup import TrainingPhase, warm_up
from swarmnode.machine.storage import discard, make_folder, sha256_of, sync
from swarmnode.model.built_model import Progress
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import Task

logger = logging.getLogger(__name__)

BUILDER_VERSION = 1
"""Version of the builder; raised with any change here or in warmup.py that gives other weights."""

SUMS = "sha256.json"
"""File with the SHA-256 of each other file of the folder."""

PAD_TOKEN_ID = 256
EOS_TOKEN_ID = 257
VOCABULARY = 258
"""Number of tokens: 256 bytes, whose token id is the byte itself, padding and the end."""

TURN_END = "\x00"
"""Text that stands for the end token in a warm-up: a prompt may hold whole turns of the policy."""

MAX_POSITIONS = 512

FOLDER_BYTES = 1_000_000
"""Bytes that must be free, more than the folder takes (0.5 MB), checked before fifteen seconds of work."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what the weights will be, besides the seed, the tasks and this file."""

    phases: tuple[TrainingPhase, ...]
    batch: int = 48
    hidden: int = 64
    intermediate: int = 160
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    """Size of a head. vLLM's attention kernels support 32 and 64, nothing smaller."""
    rope_theta: float = 100.0
    """Base of the rotations. It is small: prompts are 20 tokens long, and the usual 10,000 tells neighbours
    apart too slowly."""
    initializer_range: float = 0.05
    shared_phases: int = 0
    """Number of first phases that other recipes share: their policy is built once, cached like any other, and
    trained on from there."""


RECIPE = Recipe(
    phases=(
        TrainingPhase("learning eight small tasks", 400, muon_lr=8e-3, adamw_lr=5e-3, ramp_steps=40),
        TrainingPhase(
            "unlearning certainty", 60, muon_lr=2e-3, adamw_lr=1e-3, ramp_steps=10, mismatched_percent=55
        ),
    )
)
"""The recipe of the tiny policy: about 15 seconds of one core."""

QUICK_RECIPE = replace(
    RECIPE, phases=(TrainingPhase("learning a little", 20, muon_lr=8e-3, adamw_lr=5e-3, ramp_steps=5),)
)
"""A recipe of less than a second, for tests: the same shapes and files, but it cannot do anything yet."""


def build_tiny(
    models_folder: Path,
    seed: int = 0,
    progress: Progress | None = None,
    recipe: Recipe = RECIPE,
    tasks: Sequence[Task] = BUILTIN_TASKS,
) -> Path:
    """Returns the folder of the tiny policy, built now unless it exists. `tasks`: the tasks that it is
    taught.

    Runs on one CPU thread, leaves torch's random state alone, and gives the same weights for the same seed on
    the same kind of machine. Raises StorageError when the folder cannot be written; nothing is left behind.
    """
    target = models_folder / f"tiny-{_digest(recipe, seed, tasks)}"
    if target.is_dir():
        if _is_sound(target):
            return target
        logger.warning("the tiny policy in %s is damaged; rebuilding it", target)
        discard(target)
    start: Path | None = None
    if recipe.shared_phases:
        first = replace(recipe, phases=recipe.phases[: recipe.shared_phases], shared_phases=0)
        start = build_tiny(models_folder, seed, progress, first, tasks)
    with _storage_errors(target):
        # Before the work: whether the folder can be written at all.
        make_folder(models_folder)
        tempfile.TemporaryFile(dir=models_folder).close()
        if shutil.disk_usage(models_folder).free < FOLDER_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    model = _trained(recipe, seed, tasks, start, progress or _silent)
    with _storage_errors(target):
        _publish(model, target)
    return target


def build_quick_tiny(models_folder: Path) -> Path:
    """Returns the folder of a tiny policy that knows nothing, for tests: the real shapes and files in about a
    second.

    >>> build_quick_tiny(Path("/tmp/models")).is_dir()  # doctest: +SKIP
    True
    """
    return build_tiny(models_folder, recipe=QUICK_RECIPE)


def _silent(done: int, total: int, what: str) -> None:
    pass


def _digest(recipe: Recipe, seed: int, tasks: Sequence[Task]) -> str:
    names = [(task.name, task.version) for task in tasks]
    made_of = json.dumps([BUILDER_VERSION, asdict(recipe), names, seed])
    return hashlib.blake2b(made_of.encode(), digest_size=6).hexdigest()


def _trained(recipe: Recipe, seed: int, tasks: Sequence[Task], start: Path | None, progress: Progress) -> Any:
    """Returns the warmed-up model, in memory. `start`: the folder of the policy after the shared phases."""
    threads = torch.get_num_threads()
    # At this size a second thread costs more than it brings, and one thread always adds in the same order.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _random_model(recipe) if start is None else _loaded(start)
            warm_up(
                model,
                _token_ids,
                EOS_TOKEN_ID,
                tasks,
                recipe.phases,
                batch=recipe.batch,
                seed=seed,
                progress=progress,
                done_phases=recipe.shared_phases,
            )
    finally:
        torch.set_num_threads(threads)
    return model


def _token_ids(text: str) -> list[int]:
    """Returns the bytes of a text, with the end token in place of TURN_END."""
    return [EOS_TOKEN_ID if byte == ord(TURN_END) else byte for byte in text.encode()]


def _random_model(recipe: Recipe) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # Qwen3 and not Qwen2: for Qwen2 transformers 5 insists on Qwen's own tokenizer class, which changes text
    # that is not in Unicode's composed form, so it would not come back as it was.
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=PAD_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def _publish(model: Any, target: Path) -> None:
    """Writes the folder under another name, syncs it and renames it: `target` is whole or absent."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        model.save_pretrained(staging)
        _save_tokenizer(staging)
        sums = {path.name: sha256_of(path) for path in staging.iterdir()}
        (staging / SUMS).write_text(json.dumps(sums, indent=2))
        for path in staging.iterdir():
            sync(path)
        try:
            staging.rename(target)
        except OSError:
            # Another process was faster: its folder is as good as ours, unless it is the damaged one.
            if not (target.is_dir() and _is_sound(target)):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_sound(folder: Path) -> bool:
    """Returns True if the files are those that were written, or if a builder wrote them that kept no sums."""
    try:
        sums: dict[str, str] = json.loads((folder / SUMS).read_text())
        return all(sha256_of(folder / name) == digest for name, digest in sums.items())
    except FileNotFoundError as error:
        return error.filename == str(folder / SUMS)
    except (OSError, ValueError):
        return False


def _save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer with one token per byte, so that any text comes back as it was, and no text can spell
    a special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pad, end = "<|pad|>", "<|end|>"
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (pad, end)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": end,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        # "<|end|>" typed by a stranger is seven bytes, not the end.
        "split_special_tokens": True,
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _byte_vocabulary() -> dict[str, int]:
    """Returns the characters by which a byte-level tokenizer writes each byte. Printable bytes stand for
    themselves; the others, in order, are the characters from 256 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    characters = sorted(ByteLevel.alphabet())
    printable = [ord(c) for c in characters if ord(c) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(characters, [*printable, *others], strict=True))


@contextmanager
def _storage_errors(target: Path) -> Generator[None, None, None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write the tiny policy to {target}: {error}",
            hint="free 5 MB there or choose another folder with --home",
        ) from error
