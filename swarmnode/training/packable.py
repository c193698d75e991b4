"""Whether a model takes packed rows, and the one switch on it that lets it.

base_model -> [prepare_for_packing] -> forward.py
                     |
               attention.py

Rather than keep a list of families, both ways are tried.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import ModelError
from swarmnode.training.attention import PACKED_ATTENTION, REPLACED, packed_attention
from swarmnode.training.layout import packed_layout

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types of transformers' configs that this file computes. Chunks and states it does not."""

PROBE_LENGTHS = (5, 11, 3)
PROBE_PROMPT = 4
"""So many tokens at the front of each row are the same, and stand in the packed row once."""

SAME_LOGITS = 1e-4
SAME_LOGITS_HALF = 2e-2
"""Relative differences up to which packed and single logits count as one; bf16 rounds at 0.004 per layer."""


def prepare_for_packing(model: Any) -> str | None:
    """Let a causal LM of transformers take packed rows. None when it does; else why not, and it is as it was.

    Whether it computes the same is tried: three short rows, and three with one prompt, packed in two orders,
    against each row alone.
    Layers that carry something from token to token past the attention (states, convolutions) so fail. No
    gradient is taken, the random state is left alone, and other threads may use the model meanwhile.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if config._attn_implementation not in (REPLACED, PACKED_ATTENTION):
        return f"its attention is {config._attn_implementation}, packing replaces {REPLACED}"
    plain = ALL_ATTENTION_FUNCTIONS[REPLACED]
    AttentionInterface.register(PACKED_ATTENTION, partial(packed_attention, plain))
    AttentionMaskInterface.register(PACKED_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[REPLACED])
    model.set_attn_implementation(PACKED_ATTENTION)
    if config._attn_implementation != PACKED_ATTENTION:
        return "transformers cannot change its attention"
    reason = _difference(model, config)
    if reason is not None:
        model.set_attn_implementation(REPLACED)
    return reason


def _difference(model: Any, config: Any) -> str | None:
    """Why packed logits are not those of the single rows, or None."""
    device = model.device
    vocabulary = model.get_input_embeddings().num_embeddings
    prompt, *rows = [
        (torch.arange(n, device=device) * 7 + n + 1) % vocabulary for n in (PROBE_PROMPT, *PROBE_LENGTHS)
    ]
    windows_seen: set[int | None] = set()
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            alone = [_logits(model, row) for row in rows]
            behind = [_logits(model, torch.cat([prompt, row])) for row in rows]
            far = max(
                _relative_difference(model, prompt, rows[::turn], alone[::turn], behind[::turn], windows_seen)
                for turn in (1, -1)
            )
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ModelError) as error:
        return f"its forward refuses a packed row ({type(error).__name__}: {str(error).splitlines()[0]})"
    if not far <= (SAME_LOGITS if model.dtype in (torch.float32, torch.float64) else SAME_LOGITS_HALF):
        return f"packed, its logits differ by {far:.1e} from those of single rows"
    if _window(config) not in windows_seen:
        return "its layers keep their sliding window to themselves"
    return None


def _logits(model: Any, ids_T: Tensor) -> Tensor:
    return model(input_ids=ids_T[None], use_cache=False).logits[0].double()


def _relative_difference(
    model: Any,
    prompt: Tensor,
    rows: list[Tensor],
    alone: list[Tensor],
    behind: list[Tensor],
    windows_seen: set[int | None],
) -> float:
    """Of one packed row: the rows on their own, then the prompt once and the rows behind it."""
    runs = [*rows, prompt, *rows]
    prompts = [None] * (len(rows) + 1) + [len(rows)] * len(rows)
    layout = packed_layout([len(run) for run in runs], prompt.device, prompts)
    packed = model(**layout.arguments(torch.cat(runs)[None]), windows_seen=windows_seen).logits[0].double()
    cut = len(prompt)
    single = torch.cat([*alone, behind[0][:cut], *(logits[cut:] for logits in behind)])
    return ((packed - single).abs().max() / single.abs().max()).item()


def _window(config: Any) -> int | None:
    """The window that at least one layer must have told the attention; None: no window, or not in all."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    return getattr(config, "sliding_window", None)
