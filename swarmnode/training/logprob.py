"""Log-probability of every completion token under the policy being trained.

packing -> [logprob] -> loss
"""

from typing import Any

import torch
from torch import Tensor

from swarmnode.training.packing import MicroBatch

PROBE_TOKENS = 8
SAME_LOGITS = 1e-2
"""Relative difference up to which two ways to the logits count as one; bf16 rounds at 0.004."""


def head_is_plain(model: Any) -> bool:
    """Whether the logits are just the head applied to the decoder's output.

    Some families cap, scale or shift them afterwards. Rather than keep a list of those, both ways are tried.
    """
    ids_BT = torch.arange(1, 1 + PROBE_TOKENS, device=model.device)[None]
    everywhere = torch.ones_like(ids_BT[:, 1:], dtype=torch.bool)
    with torch.no_grad():
        short, full = (_logits(model, ids_BT, everywhere, plain).float() for plain in (True, False))
    return bool((short - full).abs().max() <= SAME_LOGITS * full.abs().max())


def completion_logprobs(
    model: Any, batch: MicroBatch, temperature: float = 1.0, *, plain_head: bool = True
) -> Tensor:
    """Log-probabilities of the completion tokens in row-major order, shape [N], float32.

    `model` is a causal LM of transformers, with or without injected LoRA layers. `temperature` is the one
    the tokens were sampled with. With a plain head (see `head_is_plain`) only completion positions pass it,
    so the [B, T, vocab] tensor of a whole forward is never built.
    """
    target_mask = batch.completion_mask_BT[:, 1:]
    targets_N = batch.input_ids_BT[:, 1:][target_mask]
    logits_NV = _logits(model, batch.input_ids_BT, target_mask, plain_head).float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    chosen_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    return chosen_N - logits_NV.logsumexp(-1)


def _logits(model: Any, input_ids_BT: Tensor, target_mask: Tensor, plain_head: bool) -> Tensor:
    """Logits that predict the masked tokens. Positions count from 0 in every row, as models do by default."""
    if not plain_head:
        return model(input_ids=input_ids_BT, use_cache=False).logits[:, :-1][target_mask]
    hidden_BTD = model.base_model(input_ids=input_ids_BT, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden_BTD[:, :-1][target_mask])
