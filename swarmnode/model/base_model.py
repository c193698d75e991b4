"""The model that a policy starts from: a published causal LM with its tokenizer."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.cpu_kernels import use_kernels
from swarmnode.errors import ModelError
from swarmnode.families.family import longest_sequence_of
from swarmnode.machine.hardware import find_card
from swarmnode.machine.memory_plan import ModelCard
from swarmnode.model.budget import is_out_of_memory
from swarmnode.models import bf16_pays_on_cpu, card_of, find_model
from swarmnode.settings.config import PolicyConfig

FINGERPRINT_VALUES = 64
"""Leading values of each tensor that enter the fingerprint: enough to tell two trainings apart."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM as loaded, before it gets an adapter."""

    name: str
    model: Any
    tokenizer: Any
    fingerprint: str
    """Digest that distinguishes base models that an adapter could be mistaken for (names, shapes and leading
    weights)."""

    @property
    def family(self) -> str:
        return str(self.model.config.model_type)

    @property
    def parameters(self) -> int:
        """Number of parameters in the base, without added LoRA layers. NF4 packs two into a byte."""
        return sum(p.numel() * (1 if p.is_floating_point() else 2) for _, p in _base_parameters(self.model))

    @property
    def is_quantized(self) -> bool:
        return not all(p.is_floating_point() for _, p in _base_parameters(self.model))

    @property
    def card(self) -> ModelCard | None:
        """Card of the model, for memory estimates. None: its architecture is unknown to the arithmetic."""
        config = self.model.config.get_text_config().to_dict()
        return card_of(self.name, config, self.parameters, [n for n, _ in _base_parameters(self.model)]).card

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model runs with. None: it has no such bound (ALiBi)."""
        return longest_sequence_of(self.model.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end of sequence, and the end tokens of the model's generation config (chat models
        have some)."""
        return end_tokens(self.tokenizer, self.model.generation_config)


def end_tokens(tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """Returns the tokens that end an answer, the tokenizer's own first. `generation_config`: None if there is
    none."""
    extra = None if generation_config is None else generation_config.eos_token_id
    listed = [] if extra is None else [extra] if isinstance(extra, int) else list(extra)
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *listed]))


def load_base_model(spec: str, config: PolicyConfig) -> LoadedModel:
    """Loads a causal LM with its tokenizer from a folder or by its hub name.

    Raises ModelError, which names the model or tokenizer that could not be found or loaded, with advice.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    # Its bars count tensors, not minutes; the hub's own download bars stay.
    transformers_logging.disable_progress_bar()
    source = find_model(spec)
    local = _only_from_disk(source)
    device = find_device(config.device)
    kernels = use_kernels(config.cpu_kernels)
    if device.type == "cpu":
        kernels.prepare()  # Compile now if necessary.
    published = read_config(spec, source)
    hidden = 0 if config.quantization == "nf4" else hidden_size(published)
    dtype = find_dtype(config.dtype, device, hidden)
    quantized: dict[str, Any] = {}
    if config.quantization == "nf4":
        from swarmnode.model.adapters.nf4 import nf4_arguments

        quantized = nf4_arguments(dtype, device)
    tokenizer = _load_tokenizer(spec, source, local)
    of_transformers: Any = AutoModelForCausalLM
    try:
        model, found = of_transformers.from_pretrained(
            source,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=local,
            # We report tensors of another shape ourselves.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **attention_arguments(published),
            **quantized,
        )
        if not quantized:
            model.to(device)
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelError(
                f"{spec} does not fit into memory: {_first_line(error)}",
                hint="choose a smaller --model; `swarmnode doctor` prints how much memory one needs",
            ) from error
        raise cannot_load(spec, error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {spec} has no end-of-sequence token", hint="choose another --model"
        )
    model.eval()
    loaded = LoadedModel(spec, model, tokenizer, _fingerprint(model))
    _check_loaded(loaded, found)
    if loaded.is_quantized:  # Including a model published in quantized form.
        from swarmnode.model.adapters.nf4 import keep_differentiable

        keep_differentiable(model)
    return loaded


def _load_tokenizer(spec: str, source: str, local: bool) -> Any:
    from transformers import AutoTokenizer

    advice = "put the model's tokenizer.json into the folder" if Path(source).is_dir() else _advice(spec)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local)
    except Exception as error:  # A broken tokenizer.json raises a bare Exception.
        # After "one of" follow lines on what transformers would convert.
        why = _first_line(error).partition(" from one of")[0]
        raise ModelError(f"cannot read the tokenizer of {spec}: {why}", hint=advice) from error
    if not _ordinary_ids(tokenizer):  # For some families transformers builds an empty one.
        raise ModelError(f"{spec} has no tokenizer", hint=advice)
    return tokenizer


def _ordinary_ids(tokenizer: Any) -> set[int]:
    """Returns the ids of all tokens except added ones, which may lie beyond the embedding: some models have
    one for pictures that their texts never use."""
    return set(tokenizer.get_vocab().values()) - tokenizer.added_tokens_decoder.keys()


def _check_loaded(loaded: LoadedModel, found: Mapping[str, Any]) -> None:
    """Raises ModelError if a tensor is missing or has another shape, or if the tokenizer is another model's.
    `found`: transformers' report of the load."""
    wrong = [
        *(
            f"{name} has the shape {tuple(shape)}, expected {tuple(expected)}"
            for name, shape, expected in found["mismatched_keys"]
        ),
        # Quantized weights have other names in files than in memory.
        *(f"{name} is missing from its files" for name in found["missing_keys"] if not loaded.is_quantized),
    ]
    if wrong:
        raise ModelError(
            f"{loaded.name} does not match its config.json: {min(wrong)}",
            hint="use the config.json and all weights of the same model",
        )
    rows = len(loaded.model.get_input_embeddings().weight)
    if (last := max(_ordinary_ids(loaded.tokenizer))) >= rows:
        raise ModelError(
            f"the tokenizer of {loaded.name} has ids up to {last}, but the model's embedding has {rows} rows",
            hint="use the tokenizer and the weights of the same model",
        )


def _only_from_disk(source: str) -> bool:
    """Returns True if a model is read without asking the hub. A folder always is."""
    if Path(source).is_dir():
        return True
    from swarmnode.model.model_hub import only_from_disk

    return only_from_disk(source)


def read_config(spec: str, source: str) -> Any:
    """Returns transformers' configuration of a model. Raises ModelError if there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            source, trust_remote_code=False, local_files_only=_only_from_disk(source)
        )
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise cannot_load(spec, error) from error


def attention_arguments(config: Any) -> dict[str, str]:
    """Returns the arguments that choose transformers' attention for this configuration. Empty: its default.

    Only eager attention computes capped scores (Gemma 2, arXiv 2408.00118). SDPA silently omits the cap: that
    would be another model than was published, and than other engines sample from.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def hidden_size(config: Any) -> int:
    """Returns the width of a model, or 0 if its configuration does not state it."""
    return int(getattr(config.get_text_config(), "hidden_size", 0))


def cannot_load(spec: str, error: Exception) -> ModelError:
    """Returns an error of transformers in our words, with advice."""
    return ModelError(f"cannot load {spec} as a causal LM: {_first_line(error)}", hint=_advice(spec))


def _advice(spec: str) -> str:
    if Path(spec).expanduser().is_dir():
        return "the folder must hold config.json, tokenizer files and safetensors weights"
    return "check the name and the connection (private models need `hf auth login`), or try --model tiny"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def find_device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise ModelError(
                f"policy.device = {name} cannot be used: {find_card(name).problem or _first_line(error)}",
                hint=find_card(name).advice or "see `swarmnode doctor`, or use auto",
            ) from error
    with warnings.catch_warnings():
        # hardware.py reports a driver that is too old, with advice; torch's own warning is hidden.
        warnings.simplefilter("ignore")
        works = torch.cuda.is_available()
    if works:
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def find_dtype(name: str, device: torch.device, hidden: int = 0) -> torch.dtype:
    """Returns the requested type, or the fastest one that is exact enough for a model of width `hidden` (0:
    unknown, float32 on a CPU). A card without bfloat16 (Turing and older) emulates it far slower than
    float32, so `auto` is float32 there."""
    if name == "auto":
        on_cpu = device.type == "cpu" and bf16_pays_on_cpu(hidden)
        on_card = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if on_cpu or on_card else torch.float32
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    try:
        one = torch.ones(1, 1, dtype=dtype, device=device)
        (one @ one).item()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"policy.dtype = {name} cannot be used on {device.type}: {_first_line(error)}",
            hint="use auto or float32",
        ) from error
    return dtype


def _base_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" not in name)


class _Recomputed:
    """The forward of a layer that keeps its inputs and recomputes the rest in the backward pass.

    transformers' own switch only works in train mode, which turns dropout on in some families. The random
    state is not kept: in eval mode nothing draws from it.
    """

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def enable_checkpointing(model: Any) -> int:
    """Trades a third more time for activations of one layer instead of all (Chen et al. 2016), in eval mode.

    Returns the number of layers; 0: transformers knows no layers of this model that can be recomputed.
    Everything that the forward pass depends on must stay unchanged until the backward pass is done (LoRA
    routes, PEFT's switches).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        if not isinstance(layer.forward, _Recomputed):
            layer.forward = _Recomputed(layer.forward)  # pyright: ignore[reportAttributeAccessIssue]
    return len(layers)


def _fingerprint(model: Any) -> str:
    return fingerprint((name, p.shape, p.detach().flatten()) for name, p in sorted(model.named_parameters()))


def fingerprint(parameters: Iterable[tuple[str, Sequence[int], Tensor]]) -> str:
    """Returns a digest of (name, shape, at least FINGERPRINT_VALUES leading values) by name. Values are
    rounded to bfloat16, so that a node whose home moves to a machine that loads the model in another type
    finds its checkpoints."""
    digest = hashlib.sha256()
    for name, shape, values in parameters:
        head = values[:FINGERPRINT_VALUES].to(torch.bfloat16).float().cpu()
        digest.update(f"{name} {tuple(shape)} ".encode() + head.numpy().tobytes())
    return digest.hexdigest()[:16]


# ---- without the weights ----


@dataclass(frozen=True, slots=True)
class Outline:
    """The structure of a causal LM, as it would be loaded."""

    model: Any
    """The transformers model on the device "meta": layers and shapes without numbers."""
    device: torch.device
    """Device of the real model."""
    is_quantized: bool
    """True if the real model has packed weights, which this outline does not show."""


def load_outline(spec: str, policy: PolicyConfig) -> Outline | None:
    """Returns an outline of the model from its configuration alone, in well under a second. None:
    transformers only builds this family with weights. Raises ModelError if there is no such causal LM."""
    from transformers import AutoModelForCausalLM

    config = read_config(spec, find_model(spec))
    device = find_device(policy.device)
    packed = policy.quantization == "nf4" or getattr(config, "quantization_config", None) is not None
    hidden = 0 if policy.quantization == "nf4" else hidden_size(config)
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=find_dtype(policy.dtype, device, hidden),
                trust_remote_code=False,
                **attention_arguments(config),
            )
    except (NotImplementedError, RuntimeError):
        return None
    except (ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise cannot_load(spec, error) from error
    return Outline(model.eval(), device, packed)
