"""Log-probabilities of given completions, by plain forward passes beside the requests in flight."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from swarmnode.rollout.decode.prompts.pass_batches import PADDING, alike
from swarmnode.rollout.request_queue import refuse_sequences

Pair = tuple[Sequence[int], Sequence[int]]
"""A pair to score: (prompt_ids, completion_ids)."""

LogitsOf = Callable[[Sequence[Sequence[int]], Sequence[int]], Iterator[Tensor]]
"""Function of sequences and of the number of tokens at the end of each whose logits are wanted. It yields
pieces [tokens, vocab] of these logits, in order."""


def score_pairs(
    pairs: Sequence[Pair], max_length: int, vocab: int, logits_of: LogitsOf, padding: int = PADDING
) -> list[tuple[float, ...]]:
    """Returns the log-probability of every completion token at temperature 1."""
    refuse_sequences(pairs, max_length, vocab)
    scores: list[tuple[float, ...]] = [()] * len(pairs)
    wanted = [index for index, (_, completion) in enumerate(pairs) if completion]
    lengths = [len(pairs[index][0]) + len(pairs[index][1]) for index in wanted]
    for batch in alike(lengths, padding):
        members = [wanted[place] for place in batch]
        for index, found in zip(members, _score_batch([pairs[i] for i in members], logits_of), strict=True):
            scores[index] = found
    return scores


def _score_batch(pairs: Sequence[Pair], logits_of: LogitsOf) -> Iterator[tuple[float, ...]]:
    tails = [len(completion) for _, completion in pairs]
    # The last token is never fed: nothing is scored behind it.
    sequences = [(*prompt, *completion)[:-1] for prompt, completion in pairs]
    targets = torch.tensor([token for _, completion in pairs for token in completion])
    pieces: list[Tensor] = []
    done = 0
    for logits in logits_of(sequences, tails):
        chosen = targets[done : done + len(logits), None].to(logits.device)
        pieces.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
        done += len(logits)
    for row in torch.cat(pieces).cpu().split(tails):
        yield tuple(row.tolist())
