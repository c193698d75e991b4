"""The card of a pushed model: figures of its run, and how to load it.

hub.py -> [model_card] -> README.md of the repository
"""

from collections.abc import Iterator
from pathlib import Path

from swarmnode.extensions.results.exported import Exported
from swarmnode.node.showing.figures import age
from swarmnode.printable import printable
from swarmnode.settings.config import Config
from swarmnode.training.checkpoints.learning_settings import learning_settings
from swarmnode.training.checkpoints.run_folders import spoken_name

ALWAYS_SHOWN = (
    *("training.loss", "training.learning_rate", "policy.lora_rank", "exchange.rule"),
    *("rollout.groups", "rollout.group_size", "rollout.max_tokens", "rollout.temperature"),
)
"""Settings of the card besides those that are no defaults."""


def base_name(name: str) -> str:
    """Returns the name of a base model for somebody else: of one in a folder, the folder's name alone."""
    name = spoken_name(name)
    return Path(name).name if Path(name).is_absolute() or Path(name).is_dir() else name


def model_card(exported: Exported, repo: str) -> str:
    """Returns the card as Markdown, with what the hub reads above it."""
    from huggingface_hub import ModelCardData

    base, merged = base_name(exported.state.base_model), exported.merged
    data = ModelCardData(
        # The hub refuses a base that has no name there.
        base_model=base if base.count("/") == 1 else None,
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["swarmnode", "reinforcement-learning", *([] if merged else ["lora"])],
    )
    return f"---\n{data.to_yaml()}\n---\n" + "\n".join(_lines(exported, repo, base)) + "\n"


def _lines(exported: Exported, repo: str, base: str) -> Iterator[str]:
    state, counters = exported.state, exported.state.counters
    kind = "Model" if exported.merged else "LoRA adapter"
    yield f"# {repo.rpartition('/')[2]}\n"
    yield f"{kind}, trained by reinforcement learning in a swarm (`swarmnode`).\n"
    tasks = sorted(state.tasks) or list(state.measure.tasks)
    per_task = f"{state.measure.examples} held-out examples of each of {len(state.measure.tasks)} tasks"
    authors = counters.external_groups_trained
    figures = {
        "Base model": base if "/" in base else f"{base} (not from a hub)",
        "Tasks": ", ".join(tasks) or "not noted",
        "Rounds": f"{counters.round} ({counters.tokens:,} tokens, {age(counters.seconds)})",
        "Held-out reward before the first round": _reward(counters.reward_first),
        f"Held-out reward after round {counters.evaluated_round}": _reward(counters.reward_last),
        "Measured on": per_task if state.measure.examples else "not noted",
        "Groups learnt from others": f"{sum(authors.values())} of {len(authors)} authors",
    }
    yield from _table(("", ""), figures)
    yield "\n## Settings\n"
    default = learning_settings(Config(), state.seed)
    yield from _table(
        ("setting", "value"),
        {
            f"`{key}`": str(value)
            for key, value in state.settings.items()
            if key in ALWAYS_SHOWN or value != default.get(key)
        },
    )
    package, loader = ("transformers", "AutoModelForCausalLM")
    if not exported.merged:
        package, loader = ("peft", "AutoPeftModelForCausalLM")
    yield f"\n## Use\n\n```python\nfrom {package} import {loader}\nfrom transformers import AutoTokenizer\n"
    yield f'model = {loader}.from_pretrained("{repo}")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n```\n'
    if "/" not in base and not exported.merged:
        yield f"The base is not on a hub: load {base} from your disk, add the adapter with `PeftModel`.\n"
    go_on = f"swarmnode join --model {repo}" if exported.merged else f"swarmnode pull {repo}"
    yield f"To continue training: `{go_on}`."


def _table(head: tuple[str, str], rows: dict[str, str]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |\n|---|---|"
    for name, value in rows.items():
        yield "| " + " | ".join(printable(cell).replace("|", "\\|") for cell in (name, value)) + " |"


def _reward(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
