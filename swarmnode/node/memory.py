"""Whether a model fits into this machine, said before it is loaded.

hardware, models (shapes, settings) -> [plan_for] -> doctor.py, run.py (the log of `join`)
assemble.py, after loading -> [budget_for] -> training
"""

from dataclasses import dataclass, replace

from swarmnode.config import Config
from swarmnode.hardware import inspect_machine, usable_gpu
from swarmnode.memory_plan import MemoryPlan, ModelCard, Workload, plan_memory, size_text, with_tokens
from swarmnode.model.budget import TokenBudget, TokenCost, token_budget, token_cost
from swarmnode.models import LOWER, find_facts, load_cards, workload
from swarmnode.paths import builtin_folder

VLLM_SHARE = 0.45
"""The share of a card that vLLM takes whatever it needs: GPU_MEMORY_SHARE of rollout/vllm/engine.py."""


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
    work = workload(config, gpu, hidden=hidden, vllm=gpu is not None and _has_vllm())
    if gpu is not None and gpu.memory_free_bytes is not None:
        free, place = float(gpu.memory_free_bytes), gpu.name
        if work.engine == "vllm":
            engine_bytes = VLLM_SHARE * (gpu.memory_total_bytes or gpu.memory_free_bytes)
    if facts.card is None:
        return PlannedMemory(None, None, facts.source, free, place)
    return _plan_card(config, facts.card, replace(work, engine_bytes=engine_bytes), free, place)


def _has_vllm() -> bool:
    """Whether there is a vLLM for a card."""
    from swarmnode.rollout.vllm.compat import missing_reason

    return missing_reason("cuda") is None


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
