"""Whether a model fits into this machine, said before it is loaded; and what it leaves room for once it is.

hardware, models (shapes, settings) -> [plan_for] -> doctor.py, run.py (the log of `join`)
assemble.py, after loading -> LocalPolicy -> [build_forward, choose_budget] -> Forward
                                          -> [choose_overlap] -> Overlap -> run.py

Both ask the same arithmetic (memory_plan.py, model/budget.py): how many tokens are trained on at once, and
whether the node generates meanwhile.
"""

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarmnode.engine_record import EngineRecord, record_of
from swarmnode.machine.hardware import Machine, inspect_machine, usable_gpu
from swarmnode.machine.memory_plan import (
    MemoryPlan,
    ModelCard,
    Workload,
    plan_memory,
    size_text,
    with_tokens,
)
from swarmnode.machine.storage import Paths, builtin_folder
from swarmnode.model.budget import TokenBudget, TokenCost, token_budget, token_cost
from swarmnode.models import LOWER, find_facts, load_cards, workload
from swarmnode.node.building.assemble import LocalPolicy, longest_sequence
from swarmnode.node.learner import Overlap, decide_overlap
from swarmnode.registry import find, names, ours
from swarmnode.settings.config import Config

if TYPE_CHECKING:
    from swarmnode.model.adapters.lora import KernelOffer
    from swarmnode.training.forward import Forward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """What the arithmetic says of a model on this machine before it is loaded."""

    plan: MemoryPlan | None
    """None where the model's shapes are not known; `facts` says why."""
    budget: TokenBudget | None
    facts: str
    free_bytes: float
    place: str
    """The card's name, or this machine's memory."""

    @property
    def fits(self) -> bool | None:
        """None: unknown."""
        return None if self.plan is None else self.plan.total <= self.free_bytes

    def describe(self) -> str:
        """The sum against what is free, in one line."""
        free = f"{size_text(self.free_bytes)} free on {self.place}"
        return f"{self.facts}; {free}" if self.plan is None else f"{self.plan.describe()}, {free}"

    @property
    def advice(self) -> str:
        return LOWER if self.fits is False else ""


def plan_for(config: Config, model: str) -> PlannedMemory:
    """The memory plan of `model` (tiny, a folder or a hub name) here. Loads nothing, not even torch."""
    machine, gpu = inspect_machine(), usable_gpu(config.policy.device)
    facts = find_facts(model, load_cards(builtin_folder("configs") / "models.toml"))
    free, place = float(machine.memory_free_bytes), "this machine"
    engine_bytes = None
    hidden = facts.card.hidden if facts.card else 0
    work = workload(config, gpu, hidden=hidden)
    if gpu is not None and gpu.memory_free_bytes is not None:
        free, place = float(gpu.memory_free_bytes), gpu.name
        if work.engine.card_share is not None:
            engine_bytes = work.engine.card_share * (gpu.memory_total_bytes or gpu.memory_free_bytes)
    if facts.card is None:
        return PlannedMemory(None, None, facts.source, free, place)
    return _plan_card(config, facts.card, replace(work, engine_bytes=engine_bytes), free, place)


def _plan_card(
    config: Config, card: ModelCard, work: Workload, free_bytes: float, place: str
) -> PlannedMemory:
    """The micro-batch takes what the rest leaves."""
    rest = plan_memory(card, work)
    room = free_bytes - (rest.total - rest.step)
    device = "cuda" if work.gpu else "cpu"
    budget = budget_for(config, room, token_cost(card, work), work.sequence_tokens, device)
    plan = plan_memory(card, with_tokens(work, budget.tokens, checkpointing=budget.checkpointing))
    return PlannedMemory(plan, budget, card.name, free_bytes, place)


def budget_for(
    config: Config, room: float | None, cost: TokenCost | None, longest: int, device: str
) -> TokenBudget:
    """`token_budget` with what the settings say. `room`: bytes free for micro-batches; None: unknown."""
    training = config.training
    return token_budget(
        room,
        cost,
        longest,
        device=device,
        wanted=training.micro_batch_tokens,
        checkpointing=training.gradient_checkpointing,
    )


# ---- after loading ----


def build_forward(config: Config, local: LocalPolicy, paths: Paths) -> "Forward":
    """How all policies on this base train: with which arithmetic, and how many tokens at once. The adapters
    of all of them are loaded by now."""
    from swarmnode.training.forward import Forward

    kernel = None
    if local.policy.device.type == "cuda":
        for name in names("gemm"):
            offer: KernelOffer = find("gemm", name)(
                local.policy.device, paths.lora_kernel, policies=config.node.policies
            )
            logger.info("LoRA layers: %s", offer.reason)
            kernel = kernel or offer.gemm
    return Forward(
        local.policy,
        config.training,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        budget=choose_budget(config, local),
        kernel=kernel,
    )


def choose_budget(config: Config, local: LocalPolicy) -> TokenBudget:
    """Tokens of one micro-batch, out of what is free now that base, engine and adapters are loaded."""
    card, longest = local.base.card, longest_sequence(config, local.base.name, local.base.max_positions)
    cost, room = None, None
    if card is not None:
        work = _loaded_workload(config, local)
        free = _free_bytes(local, inspect_machine())
        cost, room = token_cost(card, work), free - _still_to_come(card, work, local)
    budget = budget_for(config, room, cost, longest, local.base.model.device.type)
    logger.info("micro-batches of %s", budget.reason)
    return budget


def choose_overlap(config: Config, local: LocalPolicy, budget: TokenBudget) -> Overlap:
    """Whether generation and training, in micro-batches of this size, fit side by side into what is free now,
    the model being loaded."""
    machine = inspect_machine()
    decision = decide_overlap(
        config.rollout.overlap,
        max_lag=config.rollout.max_lag,
        gpu=local.base.model.device.type == "cuda",
        cores=machine.cores,
        free_bytes=_free_bytes(local, machine),
        need_bytes=_overlap_bytes(config, local, budget),
    )
    logger.info("overlap of generation and training %s", decision.reason)
    return decision


def _overlap_bytes(config: Config, local: LocalPolicy, budget: TokenBudget) -> float | None:
    """What generation and training take at once, beyond what is loaded; None where nobody can tell."""
    card = local.base.card
    if card is None:
        return None
    work = replace(
        _loaded_workload(config, local),
        micro_batch_tokens=budget.tokens,
        checkpointing=budget.checkpointing,
    )
    return plan_memory(card, work).step + _still_to_come(card, work, local)


def _free_bytes(local: LocalPolicy, machine: Machine) -> int:
    """Free bytes of the device that the model is on."""
    import torch

    device = local.base.model.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.memory_free_bytes


def _still_to_come(card: ModelCard, work: Workload, local: LocalPolicy) -> float:
    """What is not taken yet when base, engine and adapters are loaded, besides activations."""
    plan = plan_memory(card, work)
    kv_cache = 0 if local.engine.capabilities.reserves_kv else plan.kv_cache
    return plan.gradients + plan.optimizer + kv_cache + work.engine.growth(card, work)


def _loaded_workload(config: Config, local: LocalPolicy) -> Workload:
    base, gpu = local.base, local.base.model.device.type == "cuda"
    return replace(
        workload(config, None),
        sequence_tokens=longest_sequence(config, base.name, base.max_positions),
        number_bytes=base.model.dtype.itemsize,
        nf4=base.is_quantized,
        engine=_engine_record(config, local),
        gpu=gpu,
    )


def _engine_record(config: Config, local: LocalPolicy) -> EngineRecord:
    """The record of the engine that was loaded. One that is none of ours was asked for."""
    name = local.engine.capabilities.name
    return record_of(name if name in ours("engine") else config.rollout.engine)
