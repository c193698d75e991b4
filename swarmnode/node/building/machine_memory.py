"""A model on this machine before it is loaded: can it load, does it fit, and how long are its sequences?

hardware, models (shapes, settings) -> [plan_for] -> diagnosis.py of the doctor, run.py (the log of `join`)
config, model -> [check_loadable] -> run.py, offline.py: nothing of torch is imported until then

loaded_memory.py uses the same arithmetic (memory_plan.py, model/budget.py) once the model is loaded.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec

from swarmnode.errors import ConfigError, ModelError
from swarmnode.families.family import refuse_at_sight
from swarmnode.machine.hardware import find_card, inspect_machine
from swarmnode.machine.installing import how_to_install
from swarmnode.machine.memory_plan import (
    MemoryPlan,
    ModelCard,
    Workload,
    plan_memory,
    sequence_bytes,
    size_text,
    with_tokens,
)
from swarmnode.machine.storage import builtin_folder
from swarmnode.model.budget import HEADROOM, TokenBudget, TokenCost, token_budget, token_cost
from swarmnode.model.model_hub import only_from_disk
from swarmnode.models import (
    LOWER,
    find_facts,
    find_model,
    load_cards,
    read_config,
    within_limit,
    workload,
)
from swarmnode.settings.config import Config


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory that a model would take on this machine, computed before it is loaded."""

    plan: MemoryPlan | None
    """None if the model's shapes are unknown; `facts` says why."""
    budget: TokenBudget | None
    facts: str
    free_bytes: float
    place: str
    """The name of the GPU, or this machine's memory."""

    @property
    def fits(self) -> bool | None:
        """True if the plan fits into the free memory. None: unknown."""
        return None if self.plan is None else self.plan.total <= self.free_bytes

    def describe(self) -> str:
        """Returns the planned and the free memory in one line."""
        free = f"{size_text(self.free_bytes)} free on {self.place}"
        return f"{self.facts}; {free}" if self.plan is None else f"{self.plan.describe()}, {free}"

    @property
    def advice(self) -> str:
        return LOWER if self.fits is False else ""


def plan_for(config: Config, model: str) -> PlannedMemory:
    """Returns the memory plan of `model` (tiny, a folder or a hub name). Loads nothing, not even torch."""
    machine, gpu = inspect_machine(), find_card(config.policy.device).gpu
    facts = find_facts(model, load_cards(builtin_folder("configs") / "models.toml"))
    free, place = float(machine.memory_free_bytes), "this machine"
    engine_bytes = None
    hidden = facts.card.hidden if facts.card else 0
    work = workload(config, gpu, hidden=hidden)
    if gpu is not None and gpu.memory_free_bytes is not None:
        free, place = float(gpu.memory_free_bytes), gpu.name
        if work.engine.card_share is not None:
            engine_bytes = work.engine.card_share * (gpu.memory_total_bytes or gpu.memory_free_bytes)
    if config.limits.memory_gb is not None:
        free, place = within_limit(config, free), f"{place} within limits.memory_gb"
    if facts.card is None:
        return PlannedMemory(None, None, facts.source, free, place)
    return _plan_card(config, facts.card, replace(work, engine_bytes=engine_bytes), free, place)


def _plan_card(
    config: Config, card: ModelCard, work: Workload, free_bytes: float, place: str
) -> PlannedMemory:
    """Returns the plan for a model of known shapes; the micro-batch takes what the rest leaves."""

    def room(work: Workload) -> float:
        rest = plan_memory(card, work)
        return free_bytes - (rest.total - rest.step)

    most = config.rollout.slots * config.node.policies
    work = replace(work, slots=slots_that_fit(card, work, spare_bytes(card, work, room(work)), most))
    device = "cuda" if work.gpu else "cpu"
    budget = budget_for(config, room(work), token_cost(card, work), work.sequence_tokens, device)
    plan = plan_memory(card, with_tokens(work, budget.tokens, checkpointing=budget.checkpointing))
    return PlannedMemory(plan, budget, card.name, free_bytes, place)


def spare_bytes(card: ModelCard, work: Workload, room: float) -> float:
    """Returns the bytes of `room` left beside the micro-batch of `work`, by default PLANNED_TOKENS. `room`:
    bytes free beside the sequences of `work`."""
    return room * (1 - HEADROOM) - plan_memory(card, work).step


def slots_that_fit(card: ModelCard, work: Workload, spare: float, most: int) -> int:
    """Returns the number of sequences to generate at once: those of `work`, a round's, and as many more, up
    to `most`, as fit into the `spare` bytes.

    The scheduler makes use of them (concurrency_control.py). They take precedence over larger micro-batches:
    where most of a decoding step is overhead, four times the sequences take hardly longer.
    """
    return work.slots + max(0, min(most - work.slots, int(spare / sequence_bytes(card, work))))


def budget_for(
    config: Config, room: float | None, cost: TokenCost | None, longest: int, device: str
) -> TokenBudget:
    """Returns `token_budget` for these settings. `room`: bytes free for micro-batches; None: unknown."""
    training = config.training
    return token_budget(
        room,
        cost,
        longest,
        device=device,
        wanted=training.micro_batch_tokens,
        checkpointing=training.gradient_checkpointing,
    )


def check_loadable(config: Config, model: str) -> None:
    """Raises ModelError or EngineError if the model cannot be loaded here, before torch is imported."""
    if find_spec("torch") is None or find_spec("peft") is None:
        raise ModelError("torch and peft are not installed", hint=how_to_install("train"))
    if model != "tiny":
        only_from_disk(find_model(model))
        refuse_at_sight(config.rollout.engine, read_config(model), config.policy.quantization)


def longest_sequence(config: Config, model: str, limit: int | None) -> int:
    """Returns the most tokens of prompt and completion that the settings allow within `limit`, the model's
    own. Raises ConfigError if no prompt fits."""
    tokens = config.rollout.max_tokens
    if limit is not None and tokens >= limit:
        raise ConfigError(
            f"rollout.max_tokens = {tokens} leaves no room for a prompt: {model} takes {limit} tokens in all",
            hint=f"try --set rollout.max_tokens={limit // 2}",
        )
    return sequence_within(config, limit)


def sequence_within(config: Config, limit: int | None) -> int:
    """Returns the most tokens of prompt and completion that the settings allow, `limit` at most."""
    wanted = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return wanted if limit is None else min(wanted, limit)
