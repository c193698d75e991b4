"""Supervised warm-up of the tiny policy: from random weights to one that knows the answers but is not
sure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.chat import asked_of
from swarmnode.tasks.builtin import StableRandom
from swarmnode.tasks.task import Task, draw_train

Pair = tuple[str, str]
"""A prompt and the answer to teach."""

Encode = Callable[[str], list[int]]

MAX_GRAD_NORM = 1.0
NEWTON_SCHULZ_STEPS = 4
"""Steps of Muon's Newton-Schulz iteration. Its default of five costs 20 % more and teaches nothing more
here."""


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """Optimizer steps under one learning-rate schedule: a ramp, a plateau, and a line down to a twentieth."""

    name: str
    steps: int
    muon_lr: float
    adamw_lr: float
    ramp_steps: int
    mismatched_percent: int = 0
    """Percentage of answers that belong to another question of the same task."""
    mismatched_by_task: tuple[tuple[str, int], ...] = ()
    """Percentage of mismatched answers by task name, in place of `mismatched_percent`."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks that are shown. Empty: all."""

    def mismatched(self, task: str) -> int:
        """Returns the percentage of mismatched answers of one task.

        >>> TrainingPhase("p", 1, 1.0, 1.0, 1, 96, (("rev", 30),)).mismatched("rev")
        30
        """
        return dict(self.mismatched_by_task).get(task, self.mismatched_percent)

    def rate(self, step: int) -> float:
        """Returns the factor of the learning rates at one step.

        >>> [TrainingPhase("p", 10, 1.0, 1.0, ramp_steps=2).rate(step) for step in (0, 1, 5, 8)]
        [0.5, 1.0, 1.0, 0.5]
        """
        ramp = min(1.0, (step + 1) / self.ramp_steps)
        decay = min(1.0, max(0.05, (self.steps - step) / (0.4 * self.steps)))
        return ramp * decay


def warm_up(
    model: Any,
    encode: Encode,
    eos_token_id: int,
    tasks: Sequence[Task],
    phases: Sequence[TrainingPhase],
    *,
    batch: int,
    seed: int,
    progress: Callable[[int, int, str], None],
    done_phases: int = 0,
) -> None:
    """Trains all weights of `model`, in place, on training draws of the tasks in equal shares.

    The first `done_phases` are behind the model: each phase has optimizers and draws of its own, so it goes
    on from there as if they had been run now.
    """
    total = sum(phase.steps for phase in phases[done_phases:])
    done = 0
    model.train()
    for number, phase in list(enumerate(phases))[done_phases:]:
        # Every phase reads other seeds: a fresh draw.
        pairs = _pairs(tasks, phase, first_seed=1000 * (len(phases) * seed + number))
        optimizers = _optimizers(model, phase)
        for step in range(phase.steps):
            progress(done, total, phase.name)
            _step(model, optimizers, phase.rate(step), _batch(encode, eos_token_id, pairs, batch))
            done += 1
    progress(done, total, phases[-1].name)
    model.eval()


def _pairs(tasks: Sequence[Task], phase: TrainingPhase, first_seed: int) -> Iterator[Pair]:
    """Yields pairs without end, the tasks of the phase taking turns."""
    shown = [task for task in tasks if not phase.tasks or task.name in phase.tasks]
    coin = StableRandom(f"warmup/{first_seed}")
    streams = [_answers(task, first_seed) for task in shown]
    others = [_answers(task, first_seed + 500) for task in shown]
    percents = [phase.mismatched(task.name) for task in shown]
    while True:
        for stream, other, percent in zip(streams, others, percents, strict=True):
            prompt, answer = next(stream)
            mismatched = coin.between(1, 100) <= percent
            yield prompt, next(other)[1] if mismatched else answer


def _answers(task: Task, first_seed: int) -> Iterator[Pair]:
    examples = chain.from_iterable(draw_train(task, seed) for seed in count(first_seed))
    return ((asked_of(example.prompt), example.columns["answer"]) for example in examples)


def _batch(encode: Encode, eos_token_id: int, pairs: Iterator[Pair], size: int) -> tuple[Tensor, Tensor]:
    """Returns token ids [B, T], and True [B, T] for those to be predicted: the answer and the end."""
    rows: list[list[int]] = []
    answers_from: list[int] = []
    for _ in range(size):
        prompt, answer = next(pairs)
        prompt_ids = encode(prompt)
        rows.append([*prompt_ids, *encode(answer), eos_token_id])
        answers_from.append(len(prompt_ids))
    width = max(map(len, rows))
    # Padding on the right, never predicted: with causal attention it needs no mask, nor a token of its own.
    ids_BT = torch.tensor([row + [eos_token_id] * (width - len(row)) for row in rows])
    position_T = torch.arange(width)
    starts_B1 = torch.tensor(answers_from)[:, None]
    ends_B1 = torch.tensor([len(row) for row in rows])[:, None]
    return ids_BT, (position_T >= starts_B1) & (position_T < ends_B1)


def _step(
    model: Any, optimizers: Sequence[torch.optim.Optimizer], rate: float, batch: tuple[Tensor, Tensor]
) -> None:
    ids_BT, target_BT = batch
    hidden = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
    predicted = target_BT[:, 1:]
    loss = F.cross_entropy(model.lm_head(hidden[predicted]), ids_BT[:, 1:][predicted])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["peak_lr"]
        optimizer.step()
        optimizer.zero_grad()


def _optimizers(model: Any, phase: TrainingPhase) -> list[torch.optim.Optimizer]:
    inner = {name: p for name, p in model.model.layers.named_parameters() if p.ndim == 2}
    inner_ids = {id(p) for p in inner.values()}
    rest = [p for p in model.parameters() if id(p) not in inner_ids]
    muon = {"params": list(inner.values()), "peak_lr": phase.muon_lr}
    adamw = {"params": rest, "peak_lr": phase.adamw_lr}
    return [
        torch.optim.Muon([muon], weight_decay=0.01, momentum=0.95, ns_steps=NEWTON_SCHULZ_STEPS),
        torch.optim.AdamW([adamw], weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]
