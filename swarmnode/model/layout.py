"""The layout of sequences in a packed row, and their boxes for attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from swarmnode.cpu_kernels import Sequences
from swarmnode.errors import ModelError

CALL_COST = 20_000
SLOT_COST = 50
"""Cost of one more SDPA call, and of one more padded token, in units of one (query, key) pair.

Measured on one CPU core with 2 heads of 32, forward and backward: 120 us, 0.6 us and 0.013 us, counting the
call twice for cutting and joining. The optimum is flat: a factor of ten either way changes a step of the tiny
policy by less than a tenth.
"""

WIDTHS_TRIED = 32
"""Bounds the search for the best widths, which is quadratic in their number."""


@dataclass(frozen=True, slots=True)
class Box:
    """Runs of similar length: the rows of one right-padded SDPA call."""

    rows: int
    queries: int
    """Width in query slots: the most tokens of any of the runs."""
    keys: int
    """Width in key slots: the most tokens of any of their sequences."""

    @property
    def continues(self) -> bool:
        """True if the runs follow prompts: their first queries already see some keys."""
        return self.queries < self.keys


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """A row's T tokens spread over P slots: each token fills at least one, a shared prompt's several."""

    token_of_slot_P: Tensor
    """Token in each slot. A pad repeats its run's last token."""
    slot_of_token_T: Tensor
    """First slot of every token that is not padding."""
    again: tuple[Tensor, Tensor] | None
    """Further slots that are not pads, and the tokens in them. None: nothing is shared."""


@dataclass(frozen=True, slots=True)
class Boxed:
    """The runs of a packed row in boxes."""

    boxes: tuple[Box, ...]
    queries: TokenSlots
    """Query slots of all boxes, row after row."""
    keys: TokenSlots


@dataclass(frozen=True)
class PackedLayout:
    """The places of the R runs of a packed row of T tokens, computed once for all layers."""

    lengths: tuple[int, ...]
    """Tokens of each run, in row order; they add up to T."""
    prompts: tuple[int | None, ...]
    """The run that each one continues. None: it begins a sequence."""
    position_ids_1T: Tensor
    """Positions, counted from 0 in every sequence: a completion after a prompt begins at the prompt's
    length."""
    query_ends: Tensor
    """0 and the running sum of the runs' lengths, int32 [R + 1]: cu_seqlens_q of flash kernels."""
    key_ends: Tensor
    """0 and the running sum of the whole sequences' lengths, int32 [R + 1]: cu_seqlens_k."""
    longest_sequence: int
    keys: TokenSlots | None
    """Whole sequences one after another, without pads. None: nothing is shared, and they are the row
    itself."""
    ready_mask_1111: Tensor
    """A mask whose four dimensions make transformers accept it as finished and build none. We never read
    it."""
    _masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    """Masks, each made for the first layer that asks and kept for the others: autograd would otherwise keep
    one per layer."""

    @cached_property
    def boxed(self) -> Boxed:
        """The runs in boxes, for attention by SDPA; kernels need none."""
        runs = _Runs.of(self.lengths, self.prompts)
        order, boxes = _in_boxes(runs)
        rows = torch.tensor(order).split([box.rows for box in boxes])
        device = self.position_ids_1T.device
        filled = list(zip(rows, boxes, strict=True))
        queries = _slots([runs.tokens(of_box, box.queries, whole=False) for of_box, box in filled], device)
        if self.keys is None:
            return Boxed(boxes, queries, queries)
        keys = [runs.tokens(of_box, box.keys, whole=True) for of_box, box in filled]
        return Boxed(boxes, queries, _slots(keys, device))

    @cached_property
    def sequences(self) -> Sequences:
        """The runs and sequences in the form of the kernels."""
        tokens = self.position_ids_1T.shape[1]
        return Sequences(
            query_ends=self.query_ends.long(),
            key_ends=self.key_ends.long(),
            key_tokens=torch.arange(tokens) if self.keys is None else self.keys.token_of_slot_P,
            longest=self.longest_sequence,
            tokens=tokens,
        )

    def arguments(self, input_ids_1T: Tensor) -> dict[str, Any]:
        """Returns the arguments of a prepared decoder, or of a whole prepared causal LM."""
        return {
            "input_ids": input_ids_1T,
            "position_ids": self.position_ids_1T,
            "attention_mask": self.ready_mask_1111,
            "use_cache": False,
            "packed_layout": self,
        }

    def mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the mask added to a box's attention scores, [rows or 1, 1, queries, keys]. None: the box is
        plainly causal."""
        box = self.boxed.boxes[number]
        if window is not None and window >= box.keys:
            window = None
        if window is None and not box.continues:
            return None
        key = number, window, dtype
        if key not in self._masks:
            self._masks[key] = self._made_mask(number, window, dtype)
        return self._masks[key]

    def _made_mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor:
        boxes = self.boxed.boxes
        box = boxes[number]
        column = torch.arange(box.keys, device=self.position_ids_1T.device)
        position = column[None]
        if box.continues:
            start = sum(before.rows * before.queries for before in boxes[:number])
            tokens = self.boxed.queries.token_of_slot_P[start : start + box.rows * box.queries]
            position = self.position_ids_1T[0, tokens].view(box.rows, box.queries)
        # Pads are right of every real key, and a query pad is at the position of its run's last token.
        position = position[:, None, :, None]
        hidden = column > position
        if window is not None:
            hidden |= column <= position - window
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def packed_layout(
    lengths: Sequence[int], device: torch.device, prompts: Sequence[int | None] | None = None
) -> PackedLayout:
    """Returns the layout of runs of these lengths, one after another.

    `prompts` names, for each run, the one that it continues, which must precede it and not continue a run
    itself. Without it, every run is a whole sequence. Raises ModelError for invalid prompts.

    >>> packed_layout([2, 3], torch.device("cpu")).position_ids_1T
    tensor([[0, 1, 0, 1, 2]])
    >>> packed_layout([2, 3, 1], torch.device("cpu"), prompts=[None, 0, 0]).position_ids_1T
    tensor([[0, 1, 2, 3, 4, 2]])
    """
    runs = _Runs.of(lengths, prompts or [None] * len(lengths))
    shares = any(prompt is not None for prompt in runs.prompts)
    offsets_R = runs.prompt_lengths_R - runs.starts_R
    positions_T = torch.arange(sum(lengths)) + offsets_R.repeat_interleave(runs.lengths_R)
    return PackedLayout(
        lengths=tuple(lengths),
        prompts=runs.prompts,
        position_ids_1T=positions_T[None].to(device),
        query_ends=_ends(runs.lengths_R).to(device),
        key_ends=_ends(runs.sequences_R).to(device),
        longest_sequence=int(runs.sequences_R.max()),
        keys=_slots([runs.all_sequences()], device) if shares else None,
        ready_mask_1111=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
    )


def boxes_for(shapes: Sequence[tuple[int, int]]) -> tuple[Box, ...]:
    """Returns the cheapest boxes, in calls and pads, for runs of (queries, keys), fewest keys first.

    Exact by dynamic programming over the distinct numbers of keys; above 32 of them, similar ones count as
    one.
    """
    if not shapes:
        return ()
    step = -(-shapes[-1][1] // WIDTHS_TRIED)
    classes = [-(-keys // step) for _, keys in shapes]
    ends = [end for end in range(1, len(shapes)) if classes[end] != classes[end - 1]] + [len(shapes)]
    most_queries = {
        start: max(queries for queries, _ in shapes[start:end]) for start, end in pairwise([0, *ends])
    }
    # The best cost of the first `end` runs, the start of their last box, and its width in queries.
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
    for end in ends:
        keys, queries = shapes[end - 1][1], 0
        found: list[tuple[int, int, int]] = []
        for start in reversed(best):
            queries = max(queries, most_queries[start])
            row = queries * keys + SLOT_COST * (queries + keys) // 2
            found.append((best[start][0] + CALL_COST + (end - start) * row, start, queries))
        best[end] = min(found)
    boxes: list[Box] = []
    end = len(shapes)
    while end:
        _, start, queries = best[end]
        boxes.append(Box(end - start, queries, shapes[end - 1][1]))
        end = start
    return tuple(reversed(boxes))


@dataclass(frozen=True, slots=True)
class _Runs:
    """R runs and the sequences that end with them, while a layout is made. On the CPU."""

    prompts: tuple[int | None, ...]
    lengths_R: Tensor
    starts_R: Tensor
    """Index in the row of each run's first token."""
    prompt_lengths_R: Tensor
    """Tokens of each run's prompt; 0 if it does not continue a run."""
    prompt_starts_R: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], prompts: Sequence[int | None]) -> "_Runs":
        for run, prompt in zip(range(len(lengths)), prompts, strict=True):
            if prompt is not None and not (0 <= prompt < run and prompts[prompt] is None):
                raise ModelError(f"run {run} of a packed row cannot continue run {prompt}")
        starts = [0, *accumulate(lengths)]
        return cls(
            tuple(prompts),
            torch.tensor(lengths),
            torch.tensor(starts[:-1]),
            torch.tensor([0 if prompt is None else lengths[prompt] for prompt in prompts]),
            torch.tensor([0 if prompt is None else starts[prompt] for prompt in prompts]),
        )

    @property
    def sequences_R(self) -> Tensor:
        """Tokens of each whole sequence."""
        return self.prompt_lengths_R + self.lengths_R

    def tokens(self, rows: Tensor, width: int, *, whole: bool) -> tuple[Tensor, Tensor]:
        """Returns the tokens that fill `width` slots of each run, or of each `whole` sequence, and True for
        slots that are not pads."""
        first_B1 = 0 if whole else self.prompt_lengths_R[rows, None]
        column, last_B1 = first_B1 + torch.arange(width), self.sequences_R[rows, None] - 1
        tokens = self._tokens_at(rows[:, None], torch.minimum(column, last_B1))
        return tokens.flatten(), (column <= last_B1).flatten()

    def all_sequences(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens of all whole sequences one after another, without pads, in the form of
        `tokens`."""
        row = torch.arange(len(self.lengths_R)).repeat_interleave(self.sequences_R)
        starts_R = self.sequences_R.cumsum(0) - self.sequences_R
        tokens = self._tokens_at(row, torch.arange(len(row)) - starts_R[row])
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def _tokens_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        behind = positions - self.prompt_lengths_R[rows]
        return torch.where(behind < 0, self.prompt_starts_R[rows] + positions, self.starts_R[rows] + behind)


def _in_boxes(runs: _Runs) -> tuple[list[int], tuple[Box, ...]]:
    """Returns the runs in the order of their boxes, and the boxes: those of whole sequences need no mask."""
    shapes = list(zip(runs.lengths_R.tolist(), runs.sequences_R.tolist(), strict=True))
    whole = [run for run, prompt in enumerate(runs.prompts) if prompt is None]
    behind = [run for run, prompt in enumerate(runs.prompts) if prompt is not None]
    for some in (whole, behind):
        some.sort(key=lambda run: (shapes[run][1], shapes[run][0]))
    boxes = [box for some in (whole, behind) for box in boxes_for([shapes[run] for run in some])]
    return whole + behind, tuple(boxes)


def _slots(parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> TokenSlots:
    """Returns the slots of parts, each given as the token of each slot, and True for slots that are not
    pads."""
    token_of_slot_P = torch.cat([tokens for tokens, _ in parts])
    slots = torch.cat([real for _, real in parts]).nonzero()[:, 0]
    tokens, by_token = token_of_slot_P[slots].sort(stable=True)
    slots = slots[by_token]
    first = torch.ones_like(tokens, dtype=torch.bool)
    first[1:] = tokens[1:] != tokens[:-1]
    again = None if bool(first.all()) else (slots[~first].to(device), tokens[~first].to(device))
    return TokenSlots(token_of_slot_P.to(device), slots[first].to(device), again)


def _ends(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
