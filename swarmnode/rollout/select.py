"""Which engine runs a model, and why.

node, cli -> [make_engine] -> embedded.py, or fallback.py for what that cannot run
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from swarmnode.rollout.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Engine
from swarmnode.rollout.fallback import GenerateEngine
from swarmnode.rollout.weights import unsupported_reason


def make_engine(
    model: PreTrainedModel | PeftModel,
    eos_token_ids: Sequence[int],
    max_slots: int = 256,
    max_length: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[Engine, str]:
    """The fastest engine that can run `model`, and one sentence that says why it is that one.

    LoRA layers that PEFT put into the model are not sampled from: an engine starts from the base, and
    `set_policy` tells it more.

    >>> engine, reason = make_engine(model, eos_token_ids=(0,))  # doctest: +SKIP
    >>> reason                                                   # doctest: +SKIP
    'embedded engine: qwen2 runs continuously in our own decode loop.'
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    reason = unsupported_reason(base)
    if reason is None:
        engine = EmbeddedEngine(base, eos_token_ids, max_slots, max_length, device)
        return engine, f"embedded engine: {base.config.model_type} runs continuously in our own decode loop."
    slower = GenerateEngine(base, eos_token_ids, max_slots, max_length, device)
    return slower, f"generate engine: one batch at a time, as {reason}."
