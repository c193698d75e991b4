"""Log-probability and entropy of every completion token under the policy being trained.

packing -> [logprob] -> losses

This file knows models: where the hidden states come from and what makes logits of them. The arithmetic is in
`head.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.model.head import TokenLogprobs, head_logprobs, logits_logprobs
from swarmnode.training.packing import MicroBatch

PROBE_TOKENS = 8
SAME_LOGITS = 1e-4
SAME_LOGITS_HALF = 2e-2
"""Relative differences up to which two ways to the logits count as one; bf16 rounds at 0.004 per layer."""


class ScaledHead(nn.Module):
    """A head whose logits are multiplied, and then pressed into (-cap, cap) by cap * tanh(z / cap)."""

    def __init__(self, head: nn.Module, multiplier: float, cap: float | None) -> None:
        super().__init__()
        self._head = head
        self._multiplier = multiplier
        self._cap = cap

    def forward(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self._head(hidden_ND) * self._multiplier
        return logits_NV if self._cap is None else (logits_NV / self._cap).tanh() * self._cap


def head_of(model: Any) -> nn.Module | None:
    """The module that makes logits of the decoder's output, so that they can be made in chunks.

    For most families it is the head itself; some multiply, divide or cap its logits, and name the number in
    their config. None: neither gives the model's logits, so only its whole forward does. What a config says
    is tried against the model: a small cap does not show where logits are small, so both have to agree.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    found = ScaledHead(head, *_adjustments(config)) if _adjustments(config) != (1.0, None) else head
    ids_BT = torch.arange(1, 1 + PROBE_TOKENS, device=model.device)[None]
    with torch.no_grad():
        short = found(model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state).double()
        full = model(input_ids=ids_BT, use_cache=False).logits.double()
    allowed = SAME_LOGITS if model.dtype in (torch.float32, torch.float64) else SAME_LOGITS_HALF
    return found if bool((short - full).abs().max() <= allowed * full.abs().max()) else None


def _adjustments(config: Any) -> tuple[float, float | None]:
    """Factor and cap of the logits by the names that transformers' families have for them."""
    values = config.to_dict()
    multiplier = float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)
    cap = values.get("final_logit_softcapping")
    return multiplier, None if cap is None else float(cap)


def completion_logprobs(
    model: Any,
    batch: MicroBatch,
    temperature: float | Tensor = 1.0,
    *,
    head: nn.Module | None,
    top_p: float = 1.0,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Log-probabilities of the N completion tokens of a batch and the entropies there, float32, in its order.

    `model` is a causal LM of transformers, with or without injected LoRA layers. `temperature` is the one the
    tokens were sampled with, for all or per token [N], and so is `top_p`. With a `head` (see `head_of`) only
    positions that predict completion tokens pass it, in chunks; without, the model's own forward builds the
    whole [B, T, vocabulary]. The entropy has a gradient only with `entropy_gradient`, for a third more.
    """
    sampled_by: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    if head is not None:
        hidden_BTD = model.base_model(**batch.forward_arguments()).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1)[batch.predictors_N]
        return head_logprobs(
            head, hidden_ND, batch.targets_N, entropy_gradient=entropy_gradient, **sampled_by
        )
    logits_NV = model(**batch.forward_arguments()).logits.flatten(0, 1)[batch.predictors_N]
    return logits_logprobs(logits_NV, batch.targets_N, entropy_gradient=entropy_gradient, **sampled_by)


def completion_logits(model: Any, batch: MicroBatch, *, head: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """A function to the logits [R, V] at R of the N places that predict completion tokens; one forward pass
    is taken now. Where there is a `head`, logits are made when they are asked for: ask for few at once."""
    if head is not None:
        hidden_BTD = model.base_model(**batch.forward_arguments()).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1)[batch.predictors_N]
        return lambda places_R: head(hidden_ND[places_R])
    logits_NV = model(**batch.forward_arguments()).logits.flatten(0, 1)[batch.predictors_N]
    return lambda places_R: logits_NV[places_R]
