"""Log-probability of every completion token under the policy being trained.

packing -> [logprob] -> loss
"""

from typing import Any

import torch
from torch import Tensor

from swarmnode.training.packing import MicroBatch

HEAD_EXTRAS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Config fields of model families that post-process the logits of their head."""


def completion_logprobs(model: Any, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the completion tokens in row-major order, shape [N], float32.

    `model` is a causal LM of transformers, with or without injected LoRA layers. `temperature` is the one
    the tokens were sampled with. Only completion positions pass the head, so the [B, T, vocab] tensor of a
    plain forward is never built.
    """
    target_mask = batch.completion_mask_BT[:, 1:]
    targets_N = batch.input_ids_BT[:, 1:][target_mask]
    logits_NV = _logits(model, batch.input_ids_BT, target_mask).float() / temperature
    chosen_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    return chosen_N - logits_NV.logsumexp(-1)


def _logits(model: Any, input_ids_BT: Tensor, target_mask: Tensor) -> Tensor:
    positions = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)[None]
    if any(model.config.to_dict().get(extra) is not None for extra in HEAD_EXTRAS):
        return model(input_ids=input_ids_BT, position_ids=positions, use_cache=False).logits[:, :-1][
            target_mask
        ]
    decoder = model.base_model
    hidden_BTD = decoder(input_ids=input_ids_BT, position_ids=positions, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden_BTD[:, :-1][target_mask])
