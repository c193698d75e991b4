"""The optimizer of everything that is trained here: a policy's adapter, or a stage of a pipeline.

trainer.py, pipeline members -> [adam]
trainer.py, before a round -> [learning_rate_at] -> the optimizer's rate
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from swarmnode.errors import ModelError
from swarmnode.model.budget import is_out_of_memory
from swarmnode.settings.config import TrainingConfig

ADAM_BETAS = (0.9, 0.99)


def learning_rate_at(config: TrainingConfig, done: int, rounds: int | None) -> float:
    """Returns the learning rate after `done` of `rounds` rounds of learning (None: without an end).

    It is never 0: warm-up starts with its first fraction, and a decay would reach 0 only after the last
    round.

    >>> half = TrainingConfig(learning_rate=1.0, schedule="linear", warmup_rounds=2)
    >>> [learning_rate_at(half, done, rounds=6) for done in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = config.warmup_rounds
    if done < warmup:
        return config.learning_rate * (done + 1) / warmup
    if config.schedule == "constant" or rounds is None:
        return config.learning_rate
    left = max(rounds - done, 1) / max(rounds - warmup, 1)
    return config.learning_rate * (
        left if config.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)
    )


def adam(parameters: Sequence[nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    """Returns AdamW with its moments already allocated: a first step that ran out of memory would leave half
    of them.

    Raises ModelError if there is not enough memory for them.
    """
    # Fused: one pass, and no temporaries of the size of the adapter.
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
    )
    try:
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            "not enough memory for the optimizer",
            hint="lower policy.lora_rank or node.policies, or use a smaller --model",
        ) from error
    return optimizer
