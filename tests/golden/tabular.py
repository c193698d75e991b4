"""A policy small enough to train in a second: a table of logits, trained as the node trains its own.

group_advantages, policy_loss -> [learning_curve] -> test_losses_learn.py, benchmarks/losses.py --golden

Six questions, whose answers are one to six tokens long, the end included. The table has a row of logits for
each place of each answer, so the expected reward is a sum and not a sample. A round takes four optimizer
steps of two micro-batches each: the ratio moves away from 1, and an answer's share in its step is not that in
its micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.settings.config import TrainingConfig
from swarmnode.training.losses import StepSize, TokenBatch, group_advantages, loss_of, policy_loss

SEEDS = (0, 1, 2)
END = 0
ANSWERS = ((END,), (3, END), (1, 2, END), (2, 4, 1, END), (4, 3, 2, 1, END), (1, 1, 2, 3, 4, END))
PLACES, TOKENS = 8, 6
"""Longest answer and vocabulary. P questions, T places, V tokens."""
GROUP_SIZE, STEPS, MICRO_BATCHES = 8, 4, 2
LEARNING_RATE = 0.15
ROUNDS, CURVE_EVERY = 16, 4


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled answer with its credit. `logprobs` are those of its tokens when it was sampled."""

    question: int
    tokens: Tensor
    logprobs: Tensor
    advantage: float


def learning_curve(loss: str, seed: int) -> list[float]:
    """Expected reward before training and after every CURVE_EVERY of ROUNDS rounds. Steps are so large here
    that gspo has the clip of the others."""
    generator = torch.Generator().manual_seed(seed)
    logits_PTV = torch.zeros(len(ANSWERS), PLACES, TOKENS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits_PTV], lr=LEARNING_RATE)
    config = TrainingConfig(loss="tests.own_losses:wide_gspo" if loss == "gspo" else loss)
    curve = [expected_reward(logits_PTV)]
    for number in range(1, ROUNDS + 1):
        answers = sampled(logits_PTV, loss, generator)
        order = torch.randperm(len(answers), generator=generator).tolist()
        for step in range(STEPS):
            train(logits_PTV, optimizer, [answers[place] for place in order[step::STEPS]], config)
        if number % CURVE_EVERY == 0:
            curve.append(expected_reward(logits_PTV))
    return curve


def sampled(logits_PTV: Tensor, loss: str, generator: torch.Generator) -> list[Answer]:
    """A group of answers to each question, without the groups that have no gradient."""
    logprobs_PTV = logits_PTV.detach().log_softmax(-1)
    found: list[Answer] = []
    for question, logprobs_TV in enumerate(logprobs_PTV):
        drawn_TG = torch.multinomial(logprobs_TV.exp(), GROUP_SIZE, replacement=True, generator=generator)
        group = [up_to_the_end(drawn_T) for drawn_T in drawn_TG.T]
        rewards = [reward(question, tokens.tolist()) for tokens in group]
        credit = group_advantages(rewards, loss_of(loss).advantage)
        for tokens, advantage in zip(group, credit or (), strict=credit is not None):
            if advantage is not None:
                places = torch.arange(len(tokens))
                found.append(Answer(question, tokens, logprobs_TV[places, tokens], advantage))
    return found


def train(
    logits_PTV: Tensor, optimizer: torch.optim.Optimizer, step: Sequence[Answer], config: TrainingConfig
) -> None:
    """One optimizer step, its gradient summed over micro-batches of different lengths."""
    size = StepSize(len(step), sum(len(answer.tokens) for answer in step), PLACES)
    by_length = sorted(step, key=lambda answer: len(answer.tokens))
    per_batch = -(-len(step) // MICRO_BATCHES)
    for start in range(0, len(step), per_batch):
        answers = by_length[start : start + per_batch]
        policy_loss(micro_batch(logits_PTV, answers), size, config).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def micro_batch(logits_PTV: Tensor, answers: Sequence[Answer]) -> TokenBatch:
    lengths = [len(answer.tokens) for answer in answers]
    rows = [(answer.question, place) for answer in answers for place in range(len(answer.tokens))]
    questions_N, places_N = torch.tensor(rows).T
    logprobs_NV = logits_PTV[questions_N, places_N].log_softmax(-1)
    chosen_N = torch.cat([answer.tokens for answer in answers])
    advantages_B = torch.tensor([answer.advantage for answer in answers], dtype=torch.float64)
    return TokenBatch(
        logprobs_N=logprobs_NV.gather(1, chosen_N[:, None])[:, 0],
        prox_N=torch.cat([answer.logprobs for answer in answers]),
        advantages_N=advantages_B.repeat_interleave(torch.tensor(lengths)),
        weights_N=torch.ones(len(rows), dtype=torch.float64),
        entropy_N=None,
        reference_N=None,
        lengths=lengths,
    )


def up_to_the_end(drawn_T: Tensor) -> Tensor:
    ends = (drawn_T == END).nonzero()
    return drawn_T[: int(ends[0]) + 1] if len(ends) else drawn_T


def reward(question: int, tokens: Sequence[int]) -> float:
    """The share of places that are right, of as many as the longer one of sample and answer has.

    >>> reward(2, [1, 3, 0]), reward(2, [1, 2, 0]), reward(0, [3, 0])
    (0.6666666666666666, 1.0, 0.0)
    """
    answer = ANSWERS[question]
    right = sum(a == b for a, b in zip(tokens, answer, strict=False))
    return right / max(len(tokens), len(answer))


def expected_reward(logits_PTV: Tensor) -> float:
    """The mean of `reward` over questions and all that the policy may say, exactly.

    Places are independent of each other, so what counts are the chance that an answer has n tokens and the
    chance of each token given that it is not the end.
    """
    chances_PTV = logits_PTV.detach().softmax(-1)
    total = 0.0
    for answer, chances_TV in zip(ANSWERS, chances_PTV, strict=True):
        goes_on_T = 1 - chances_TV[:, END]
        right = [
            float(chances_TV[place, token] / goes_on_T[place]) for place, token in enumerate(answer[:-1])
        ]
        reached = 1.0
        for n in range(1, PLACES + 1):
            ends = float(chances_TV[n - 1, END])
            before = sum(right[: n - 1])
            total += reached * ends * (before + (n == len(answer))) / max(n, len(answer))
            reached *= 1 - ends
        total += reached * sum(right) / PLACES
    return total / len(ANSWERS)
