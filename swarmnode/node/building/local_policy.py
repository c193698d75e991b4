"""A policy on its base model, with the engine that samples from it, and more policies beside it.

config, paths -> [load_policy] -> LocalPolicy -> [policies_beside] -> run.py: one for each seat of a process
                 (on a SharedEngine)                               -> callers.py: others who ask its engine
                                              -> loaded_memory.py: Forward, which trains all of them
                                              -> offline.py: the policy of a checkpoint

This module imports torch, so it is imported only right before a model is loaded: a mistyped task or a busy
port is reported at once.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from swarmnode.cpu_kernels import use_kernels
from swarmnode.machine.hardware import GIB, find_card, torch_threads
from swarmnode.machine.storage import Paths
from swarmnode.model.base_model import LoadedModel, find_device, load_base_model
from swarmnode.model.built_model import Progress, source_of
from swarmnode.model.policy import Policy
from swarmnode.models import find_model
from swarmnode.node.building.look_ahead import look_ahead
from swarmnode.node.building.machine_memory import longest_sequence, sequence_within
from swarmnode.node.building.policies import Seat, label_of
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.rollout.engine import Engine
from swarmnode.rollout.engine_choice import make_engine
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.shared_engine import SharedEngine
from swarmnode.settings.config import Config, PolicyConfig
from swarmnode.tasks.task import Task
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.checkpoints.run_folders import choose_run, name_of_base, newest_run, runs_in
from swarmnode.training.cohort import Cohort
from swarmnode.training.losses import loss_of
from swarmnode.training.records import TrainReport
from swarmnode.training.round import RoundOfPolicy
from swarmnode.training.rules.rules import rule_of
from swarmnode.training.trainer import train_together

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalPolicy:
    """A policy, and the engine that samples from it."""

    base: LoadedModel
    policy: Policy
    engine: Engine
    """This policy's part of the shared engine."""
    shared: SharedEngine
    renderer: Renderer


def load_policy(
    config: Config,
    model: str,
    paths: Paths,
    progress: Progress,
    *,
    seed: int = 0,
    policies: int = 1,
    trains: bool = True,
) -> LocalPolicy:
    """Load (or, for tiny, build) the base model and put a new adapter on it. The engine can serve this many
    `policies` at once, each with as many rows as a single one would have. Without `trains`, the configured
    answers may be longer than the model takes."""
    # Refuse what cannot be imported before anything is loaded.
    loss_of(config.training.loss)
    rule_of(config.exchange.rule)
    card = find_card(config.policy.device)
    if card.problem:
        logger.warning("%s; this node runs on the CPU. %s", card.problem, card.advice)
    torch.set_num_threads(torch_threads())
    use_kernels(config.policy.cpu_kernels).keep_in(paths.cache / "native")
    source = source_of(model, paths.models, progress)
    look_ahead(config, source, policies=policies)
    if config.limits.memory_gb is not None and card.gpu is not None and card.gpu.memory_total_bytes:
        share = config.limits.memory_gb * GIB / card.gpu.memory_total_bytes
        cast(Any, torch.cuda).set_per_process_memory_fraction(
            min(1.0, share), find_device(config.policy.device)
        )
    STOP_SIGNALS.check()
    base = load_base_model(source, config.policy)
    limit = base.max_positions
    renderer = renderer_of(config.policy, base.tokenizer, base.eos_token_ids)
    STOP_SIGNALS.check()
    engine, reason = make_engine(
        base.model,
        base.eos_token_ids,
        config.rollout.slots * policies,
        max_length=longest_sequence(config, base.name, limit) if trains else sequence_within(config, limit),
        kind=config.rollout.engine,
        source=find_model(source),
        lora_rank=config.policy.lora_rank,
        policies=policies,
    )
    logger.info("rollout engine: %s", reason)
    try:
        policy = Policy(base, config.policy, seed)
        shared = SharedEngine(engine, policies, people_first=config.rollout.first == "people")
    except BaseException:
        engine.close()
        raise
    logger.info("LoRA changes %s", policy.targets.describe())
    return LocalPolicy(base, policy, shared.member(label_of(0)), shared, renderer)


def renderer_of(
    config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]
) -> Renderer:
    """Returns the renderer that reads a model's prompts and writes its answers, as the settings say."""
    return Renderer(tokenizer, eos_token_ids, config.chat_template, raw_prompts=config.raw_prompts)


def checkpoint_store(
    config: Config,
    model: str,
    paths: Paths,
    base: LoadedModel,
    tasks: Mapping[str, Task] | None = None,
    *,
    tells: bool = True,
) -> CheckpointStore:
    """Returns the checkpoints of the run that trains a policy on this base and these tasks. `tasks` None:
    those of the run to evaluate. `tells`: log the choice if it is not simply the previous run. Raises
    CheckpointError.
    """
    root, named, old = paths.checkpoints, config.node.run, name_of_base(model, base.fingerprint)
    known = runs_in(root)
    if tasks is None:
        run = newest_run(known, base.fingerprint, named=named) or old
    else:
        versions = {name: task.version for name, task in tasks.items()}
        choice = choose_run(known, base.fingerprint, versions, named=named, old_name=old)
        run = choice.name
        if choice.reason and tells:
            logger.info("%s", choice.reason)
    return CheckpointStore(root / run, keep=config.node.keep_checkpoints)


def policies_beside(first: LocalPolicy, seats: Sequence[Seat]) -> list[LocalPolicy]:
    """Returns the policies of all seats on the first one's base, each with its part of the engine."""
    others = [
        replace(
            first,
            policy=Policy(first.base, seat.config.policy, seat.seed, beside=first.policy),
            engine=first.shared.member(seat.label),
        )
        for seat in seats[1:]
    ]
    return [first, *others]


def cohort_of(seats: Sequence[Seat]) -> Cohort[RoundOfPolicy, TrainReport] | None:
    """Returns the place where several policies meet to train in one batch, or None for a single policy."""
    if len(seats) == 1:
        return None
    return Cohort([seat.label for seat in seats], train_together)
