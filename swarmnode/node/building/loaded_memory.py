"""Memory once a model is loaded: how many tokens to train on at once, and whether to generate meanwhile.

local_policy.py -> LocalPolicy -> [build_forward, choose_budget] -> Forward, of all policies on this base
                               -> [choose_overlap] -> Overlap -> members.py
"""

import logging
from dataclasses import replace

import psutil
import torch

from swarmnode.engine_record import EngineRecord, record_of
from swarmnode.machine.hardware import Machine, inspect_machine
from swarmnode.machine.memory_plan import ModelCard, Workload, plan_memory, sequence_bytes
from swarmnode.model.budget import TokenBudget, token_cost
from swarmnode.models import within_limit, workload
from swarmnode.node.building.local_policy import LocalPolicy
from swarmnode.node.building.machine_memory import budget_for, longest_sequence, slots_that_fit, spare_bytes
from swarmnode.node.learner import Overlap, decide_overlap
from swarmnode.registry import ours
from swarmnode.settings.config import Config
from swarmnode.training.forward import Forward
from swarmnode.training.trainer import rehearse

logger = logging.getLogger(__name__)


def build_forward(config: Config, local: LocalPolicy) -> Forward:
    """Returns the forward pass that trains all policies on this base, with its micro-batch size chosen. All
    their adapters must be loaded by now. On a GPU it tries the largest micro-batch at once; on a CPU that
    would prove nothing, since the system lends the memory anyway. Raises ModelError if it does not fit."""
    forward = Forward(
        local.policy,
        config.training,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        budget=choose_budget(config, local),
        before_a_batch=local.shared.give_way,
    )
    if local.base.model.device.type != "cpu":
        if not forward.budget.fits:
            local.engine.sleep()
        rehearse(forward, local.policy, longest_sequence(config, local.base.name, local.base.max_positions))
        local.engine.submit(())
        logger.info("tried the largest micro-batch: %d tokens fit", forward.micro_batch_tokens)
    return forward


def choose_budget(config: Config, local: LocalPolicy) -> TokenBudget:
    """Returns the tokens of one micro-batch, from what is free now that base, engine and adapters are loaded.
    From now on the engine holds no more than was left to it."""
    card, longest = local.base.card, longest_sequence(config, local.base.name, local.base.max_positions)
    cost, room = None, None
    if card is not None:
        free = free_bytes(config, local.base.model.device, inspect_machine())
        _bound_engine(config, local, card, free)
        work = _loaded_workload(config, local)
        cost, room = token_cost(card, work), free - _still_to_come(card, work, local)
    budget = budget_for(config, room, cost, longest, local.base.model.device.type)
    logger.info("micro-batches of %s", budget.reason)
    return budget


def _bound_engine(config: Config, local: LocalPolicy, card: ModelCard, free: float) -> None:
    """Bounds the sequences, then the guests' versions, that the engine holds, by the memory that is free
    beside those of a round and a micro-batch."""
    shared, can = local.shared, local.engine.capabilities
    slots = min(workload(config, None).slots, can.max_running)
    work = replace(_loaded_workload(config, local), slots=slots, guest_copies=0)
    spare = spare_bytes(card, work, free - _still_to_come(card, work, local))
    rows, versions = can.max_running, shared.guest_versions
    if not can.reserves_kv:
        rows = slots_that_fit(card, work, spare, rows)
        spare -= (rows - slots) * sequence_bytes(card, work)
    growth = work.engine.growth
    if a_copy := growth(card, replace(work, guest_copies=1)) - growth(card, work):
        versions = max(0, int(spare / a_copy) - 1)
    shared.hold_at_most(rows, versions)
    if rows < can.max_running:
        logger.info("memory left for %d answers at once (rollout.slots: %d)", rows, can.max_running)


def choose_overlap(config: Config, local: LocalPolicy, budget: TokenBudget) -> Overlap:
    """Decides whether to generate while training, with micro-batches of this size. Both have to fit into the
    memory that is free now that the model is loaded."""
    machine = inspect_machine()
    decision = decide_overlap(
        config.rollout.overlap,
        gpu=local.base.model.device.type == "cuda",
        cores=machine.cores,
        free_bytes=free_bytes(config, local.base.model.device, machine),
        need_bytes=_overlap_bytes(config, local, budget),
    )
    logger.info("overlap of generation and training %s", decision.reason)
    return decision


def free_bytes(config: Config, device: torch.device, machine: Machine) -> float:
    """Returns the bytes of a device that we may use, within limits.memory_gb. Memory that torch keeps
    reserved on a GPU, since the largest micro-batch was tried, counts as free."""
    if device.type == "cuda":
        taken = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - taken
    else:
        free, taken = machine.memory_free_bytes, psutil.Process().memory_info().rss
    return within_limit(config, free, taken)


def _overlap_bytes(config: Config, local: LocalPolicy, budget: TokenBudget) -> float | None:
    """Returns the bytes that generation and training at once need beyond what is loaded. None: unknown."""
    card = local.base.card
    if card is None:
        return None
    work = replace(
        _loaded_workload(config, local),
        micro_batch_tokens=budget.tokens,
        checkpointing=budget.checkpointing,
    )
    return plan_memory(card, work).step + _still_to_come(card, work, local)


def _still_to_come(card: ModelCard, work: Workload, local: LocalPolicy) -> float:
    """Returns the bytes, besides activations, not yet taken when base, engine and adapters are loaded."""
    plan = plan_memory(card, work)
    kv_cache = 0 if local.engine.capabilities.reserves_kv else plan.kv_cache
    return plan.gradients + plan.optimizer + kv_cache + work.engine.growth(card, work)


def _loaded_workload(config: Config, local: LocalPolicy) -> Workload:
    base, gpu = local.base, local.base.model.device.type == "cuda"
    return replace(
        workload(config, None),
        slots=local.engine.capabilities.max_running,
        # The guests' versions, and the base.
        guest_copies=local.shared.guest_versions and local.shared.guest_versions + 1,
        sequence_tokens=longest_sequence(config, base.name, base.max_positions),
        number_bytes=base.model.dtype.itemsize,
        nf4=base.is_quantized,
        engine=_engine_record(config, local),
        gpu=gpu,
    )


def _engine_record(config: Config, local: LocalPolicy) -> EngineRecord:
    """Returns the record of the loaded engine: ours by its name, any other as configured."""
    name = local.engine.capabilities.name
    return record_of(name if name in ours("engine") else config.rollout.engine)
