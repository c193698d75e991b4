"""Tests if a model takes packed rows, and switches it to them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import ModelError
from swarmnode.model.attention import PACKED_ATTENTION, REPLACED, packed_attention
from swarmnode.model.layout import packed_layout

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types of transformers' configs that this file can compute. It cannot compute types with chunks or
states."""

PROBE_LENGTHS = (5, 11, 3)
PROBE_PROMPT = 4
"""Tokens of the common prompt at the front of each row, which appears once in the packed row."""

SAME_LOGITS = 1e-4
SAME_LOGITS_HALF = 6e-2
"""The largest relative differences at which packed and single logits count as equal. In bfloat16 this is 16
times its step: leaks between sequences are checked separately, so this only has to catch forwards that
compute something else."""

TIMES_ROUNDING = 5.0
"""Allowed multiple of the rounding of the model's own type, measured as the difference of a row from itself
with more tokens after it."""

LEAK_OF_ROUNDING = 0.25
"""Share of the rounding by which other tokens around a run, of the same lengths, may change it. The products
have the same shapes, so they change nothing; but some libraries sum in an order of their own."""


def prepare_for_packing(model: Any) -> str | None:
    """Switches a causal LM of transformers to packed rows. Returns None, or the reason why it cannot; the
    model is then unchanged.

    This is tested by computing: three short rows, and three with one prompt, packed in two orders, are
    compared with each row alone, and with each other after changing the tokens around them. The first
    comparison allows for the rounding of the model's own type; the second has no rounding, and shows the
    smallest leak between sequences. Layers that pass something from token to token outside the attention
    (states, convolutions) fail it. No gradient is taken, the random state is unchanged, and other threads may
    use the model meanwhile.
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
    """Returns the reason why packed logits differ from those of the single rows, or None."""
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
            rounding = _rounding(model, rows, alone)
            packed = partial(_packed_logits, model, prompt, windows_seen=windows_seen)
            far = max(
                _apart(packed(rows[::turn]), _single(prompt, alone[::turn], behind[::turn]))
                for turn in (1, -1)
            )
            leak = max(_leak(packed, rows, number, vocabulary) for number in range(len(rows)))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ModelError) as error:
        return f"its forward refuses a packed row ({type(error).__name__}: {str(error).splitlines()[0]})"
    same = SAME_LOGITS if model.dtype in (torch.float32, torch.float64) else SAME_LOGITS_HALF
    if not far <= max(same, TIMES_ROUNDING * rounding):
        return f"packed, its logits differ by {far:.1e} from those of single rows"
    if not leak <= max(SAME_LOGITS, LEAK_OF_ROUNDING * rounding):
        return f"packed, its logits change by {leak:.1e} with other sequences around them"
    if _window(config) not in windows_seen:
        return "its layers keep their sliding window to themselves"
    return None


def _logits(model: Any, ids_T: Tensor) -> Tensor:
    return model(input_ids=ids_T[None], use_cache=False).logits[0].double()


def _packed_logits(
    model: Any, prompt: Tensor, rows: Sequence[Tensor], *, windows_seen: set[int | None]
) -> Tensor:
    """Returns the logits of one packed row: the rows on their own, then the prompt once and the rows after
    it."""
    runs = [*rows, prompt, *rows]
    prompts = [None] * (len(rows) + 1) + [len(rows)] * len(rows)
    layout = packed_layout([len(run) for run in runs], prompt.device, prompts)
    return model(**layout.arguments(torch.cat(runs)[None]), windows_seen=windows_seen).logits[0].double()


def _single(prompt: Tensor, alone: Sequence[Tensor], behind: Sequence[Tensor]) -> Tensor:
    """Returns the logits of `_packed_logits` from rows that were computed one by one."""
    cut = len(prompt)
    return torch.cat([*alone, behind[0][:cut], *(logits[cut:] for logits in behind)])


def _leak(
    packed: Callable[[list[Tensor]], Tensor], rows: list[Tensor], number: int, vocabulary: int
) -> float:
    """Returns the relative change of one row, on its own and after the prompt, when the other rows have other
    tokens."""
    others = [row if index == number else (row + 1) % vocabulary for index, row in enumerate(rows)]
    sizes = [len(row) for row in rows]
    own, changed = (
        [runs[number], runs[len(rows) + 1 + number]]
        for runs in (packed(some).split([*sizes, PROBE_PROMPT, *sizes]) for some in (rows, others))
    )
    return _apart(torch.cat(changed), torch.cat(own))


def _rounding(model: Any, rows: Sequence[Tensor], alone: Sequence[Tensor]) -> float:
    """Returns the difference of rows from themselves with more tokens after them, which they do not see."""
    longer = [_logits(model, torch.cat([row, *(row.flip(0),) * times])) for row in rows for times in (1, 3)]
    twice = [logits for logits in alone for _ in range(2)]
    return max(_apart(more[: len(once)], once) for more, once in zip(longer, twice, strict=True))


def _apart(found: Tensor, expected: Tensor) -> float:
    """Returns the relative difference by root mean square: a maximum of rounding errors says little."""
    return ((found - expected).norm() / expected.norm()).item()


def _window(config: Any) -> int | None:
    """Returns the window that at least one layer must pass to the attention. None: no layer is required
    to."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    return getattr(config, "sliding_window", None)
