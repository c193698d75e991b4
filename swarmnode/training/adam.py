"""The optimizer of everything that is trained here: of a policy's adapter, of a stage of a pipeline.

trainer.py, pipeline members -> [adam]
"""

from collections.abc import Sequence

import torch
from torch import nn

from swarmnode.errors import ModelError
from swarmnode.model.budget import is_out_of_memory

ADAM_BETAS = (0.9, 0.99)


def adam(parameters: Sequence[nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    """AdamW with its moments in place: a first step that found no memory for them would leave half of them.

    Raises ModelError where there is no memory for them now.
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
            "no memory for the optimizer of what is trained",
            hint="lower policy.lora_rank or node.policies, or use a smaller --model",
        ) from error
    return optimizer
