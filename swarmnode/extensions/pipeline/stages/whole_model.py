"""The whole model as a pipeline member knows it: read from its folder, without loading any stage's weights.

models folder or hub -> [WholeModel] -> partition (card), stages, tokenizer, fingerprint

The fingerprint equals the one that a single machine computes for the loaded model (base_model.py), so
checkpoints of a pipeline and of a single machine show if they belong together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.stages.loading import WeightFolder
from swarmnode.extensions.pipeline.stages.stage_model import (
    StageModel,
    StagePart,
    StageSettings,
    build_stage,
)
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.families.family import longest_sequence_of
from swarmnode.machine.memory_plan import ModelCard
from swarmnode.model.base_model import FINGERPRINT_VALUES, end_tokens, fingerprint, read_config
from swarmnode.models import card_of, find_model

HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model", "*.txt")
"""Patterns of a hub model's data files. Code and pickled weights are not downloaded."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model to cut stages from."""

    name: str
    folder: Path
    config: Any
    """The model's transformers configuration."""
    weights: WeightFolder
    card: ModelCard
    packs: bool
    """True if micro-batches may be packed (trial_cut.py)."""
    fingerprint: str

    def stage(self, part: StagePart, settings: StageSettings) -> StageModel:
        """Return a stage of the model, using memory only for the tensors of this stage. Raises ModelError if
        files are missing or do not fit."""
        return build_stage(self.config, part, self.weights.read, settings, self.packs)

    @property
    def family(self) -> str:
        return str(self.config.model_type)

    @property
    def layers(self) -> int:
        return self.card.layers

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model may be run with; None if there is no limit."""
        return longest_sequence_of(self.config)


def open_model(spec: str, dtype: torch.dtype) -> WholeModel:
    """Inspect a model without loading it; a model on the hub is downloaded. `dtype`: of the stages.

    Raises ModelError if the model cannot be found, read or cut into stages, or if its files do not tell its
    size.
    """
    folder = _folder(find_model(spec))
    config = read_config(spec, str(folder))
    weights = WeightFolder.open(folder)
    parameters = _parameters(config, dtype)
    numbers = sum(math.prod(shape) for _, shape in parameters)
    text = config.get_text_config().to_dict()
    facts = card_of(spec, text, numbers, [name for name, _ in parameters])
    if facts.card is None:
        raise ModelError(
            f"{spec} cannot be planned for: {facts.source}", hint="a pipeline holds dense decoders"
        )
    mark = fingerprint(_leading(weights, parameters, dtype))
    return WholeModel(spec, folder, config, weights, facts.card, try_cut(config), mark)


def load_tokenizer(model: WholeModel) -> tuple[Any, tuple[int, ...]]:
    """Return the tokenizer, and the tokens that end an answer. Raises ModelError."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(model.folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{model.name} has no tokenizer that can be read: {str(error).splitlines()[0]}",
            hint="the folder must hold the tokenizer's files beside the weights",
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {model.name} has no end-of-sequence token")
    has_generation = (model.folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(str(model.folder)) if has_generation else None
    return tokenizer, end_tokens(tokenizer, generation)


def _folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"cannot get {source} from the hub: {str(error).splitlines()[0]}",
            hint="check the name and the connection (private models need `hf auth login`), or name a folder",
        ) from error


def _parameters(config: Any, dtype: torch.dtype) -> list[tuple[str, torch.Size]]:
    """Return names and shapes of all parameters, sorted by name, from a model without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        causal_lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sorted((name, parameter.shape) for name, parameter in causal_lm.named_parameters())


def _leading(
    weights: WeightFolder, parameters: Sequence[tuple[str, torch.Size]], dtype: torch.dtype
) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    for name, shape in parameters:
        yield name, shape, weights.leading(name, FINGERPRINT_VALUES).to(dtype)
