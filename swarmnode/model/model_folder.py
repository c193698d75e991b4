"""Writes a model loaded by a script once, to a folder named by its weights."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from swarmnode.errors import ModelError, StorageError
from swarmnode.machine.storage import whole_folder

_SAFE = re.compile(r"[^A-Za-z0-9._-]+")

CHUNK_BYTES = 64 << 20
"""Bytes of a tensor that are copied at a time for hashing."""


def folder_of_model(model: Any, tokenizer: Any, models: Path) -> Path:
    """Returns the folder under `models` with this model and its tokenizer, and writes it unless it exists.
    `tokenizer`: None for the one of the model's name. Raises StorageError, and ModelError for anything but a
    causal LM of transformers with weights of its own."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        hint = f"pass a name, a folder, or {_CAUSAL}.from_pretrained(...)"
        if hasattr(model, "merge_and_unload"):
            hint = "pass model.merge_and_unload(), or the base without an adapter"
        raise ModelError(f"a {type(model).__name__} is not a model", hint=hint)
    if not model.can_generate():
        raise ModelError(f"a {type(model).__name__} cannot generate", hint=f"load it with {_CAUSAL}")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            "this model has an adapter", hint="pass model.merge_and_unload(), or the base without one"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(
            "this model is quantized", hint='pass its name, and settings={"policy.quantization": "nf4"}'
        )
    named = str(model.config.name_or_path or "")
    tokenizer = _tokenizer_of(named) if tokenizer is None else tokenizer
    if not callable(getattr(tokenizer, "save_pretrained", None)) or not hasattr(tokenizer, "encode"):
        raise ModelError(f"a {type(tokenizer).__name__} is not a tokenizer", hint="pass an AutoTokenizer")
    short = _SAFE.sub("-", Path(named).name)[:40].strip(".-") or type(model).__name__
    folder = models / f"{short}-{_digest(model, tokenizer)}"
    if not folder.exists():
        _write(model, tokenizer, folder)
    return folder


_CAUSAL = "AutoModelForCausalLM"


def _tokenizer_of(named: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(named, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"no tokenizer found for the model name {named!r}", hint="also pass tokenizer=..."
        ) from error


def _digest(model: Any, tokenizer: Any) -> str:
    """Returns a digest of all weights, the configurations and the tokenizer."""
    digest = hashlib.blake2b(digest_size=8)
    config = {**model.config.to_dict(), "_name_or_path": "", "transformers_version": ""}
    generation = {} if model.generation_config is None else model.generation_config.to_dict()
    said = [config, generation, sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    said += [tokenizer.special_tokens_map]
    digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for data in _bytes_of(tensor):
            digest.update(data)
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Iterator[bytes]:
    if tensor.is_meta:
        raise ModelError("some weights of this model are not in memory", hint="load it without device_map")
    flat = tensor.detach().contiguous().view(-1)
    step = max(1, CHUNK_BYTES // tensor.element_size())
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu().view(torch.uint8).numpy().tobytes()


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    try:
        with whole_folder(folder, replaces=False) as aside:
            model.save_pretrained(aside, safe_serialization=True)
            tokenizer.save_pretrained(aside)
    except OSError as error:
        if (folder / "config.json").exists():
            return  # Another process was faster.
        raise StorageError(f"cannot write {folder}: {error}", hint="check the disk and --home") from error
