"""Standard evaluations of a base model and of what was trained on it, side by side.

`swarmnode eval --suite` -> [evaluate_suites] -> extensions/suites/, training/evaluation.py -> SuiteEvaluation

Both are asked the same questions in the same way with the same seeds. One answer to each is greedy; several
are sampled, and pass@k is estimated from them without bias.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import stdev

from swarmnode.errors import ConfigError
from swarmnode.extensions.suites.formats import Prompting
from swarmnode.extensions.suites.suite import Suite, SuiteQuestions, load_suites
from swarmnode.extensions.suites.suite_report import SuiteEvaluation, SuiteResult, SuiteScore
from swarmnode.extensions.suites.suite_rows import SUFFIXES
from swarmnode.node.commands.offline import apply_checkpoint, load_checkpoint, of_round, with_room
from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings
from swarmnode.tasks.task import score_strictly
from swarmnode.training.evaluation import collect, pass_at_k, powers_of_two
from swarmnode.types import mean_or_none, total_reward

MIN_PROMPT_TOKENS = 2048
"""Longest prompt, where rollout.max_prompt_tokens is less: eight worked examples are about a thousand."""


def evaluate_suites(
    settings: Settings,
    suites: Sequence[Path],
    *,
    base: bool = False,
    best: bool = False,
    greedy: bool = False,
    samples: int = 1,
    shots: int | None = None,
    limit: int | None = None,
) -> SuiteEvaluation:
    """Measures the base model and, unless `base` says otherwise, the newest or the best checkpoint on suites.

    `shots`: worked examples in front of a question; None: as usual. `limit`: only the first questions. What
    is wrong with a suite is said before a model is loaded. Raises TaskError, CheckpointError.
    """
    if greedy and samples > 1:
        raise ConfigError("greedy decoding gives the same answer every time", hint="leave out --samples")
    loaded = load_suites(suites)
    settings = replace(settings, config=_with_long_prompts(settings.config))
    with load_checkpoint(settings, base=base, best=best, apply=False) as (local, checkpoint):
        config = with_room(settings.config, local)
        has_template = bool(local.base.tokenizer.chat_template) and not config.policy.raw_prompts
        prompting = Prompting(has_template, shots)
        asked = {name: suite.questions(prompting, limit) for name, suite in loaded.items()}
        temperature = config.rollout.temperature if samples > 1 else 0.0
        sampling = SamplingParams(config.rollout.max_tokens, temperature, config.rollout.top_p)
        before = measure(local.engine, local.renderer, loaded, asked, sampling, samples=samples)
        after: Mapping[str, SuiteScore] = {}
        if checkpoint is not None:
            apply_checkpoint(local, checkpoint)
            after = measure(local.engine, local.renderer, loaded, asked, sampling, samples=samples)
    trained = () if checkpoint is None else checkpoint.state.task_specs
    return SuiteEvaluation(
        model=settings.model,
        policy=None if checkpoint is None else f"checkpoint {of_round(checkpoint)}",
        sampling=f"sampled at temperature {temperature:g}" if temperature else "greedy",
        samples=samples,
        max_tokens=sampling.max_tokens,
        suites=tuple(
            _result(suite, prompting, asked[name], trained, before[name], after.get(name))
            for name, suite in loaded.items()
        ),
    )


def measure(
    engine: Engine,
    renderer: Renderer,
    suites: Mapping[str, Suite],
    asked: Mapping[str, SuiteQuestions],
    sampling: SamplingParams,
    *,
    samples: int,
) -> dict[str, SuiteScore]:
    """Asks everything `samples` times and judges it. Raises TaskError, SandboxError."""
    counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    cut: dict[str, list[bool]] = defaultdict(list)
    # The engine would refuse what is longer, and say so of each.
    room = engine.capabilities.max_length - sampling.max_tokens
    questions = [
        example
        for one in asked.values()
        for example in one.asked
        if len(renderer.prompt_ids(example.prompt)) <= room
    ]
    for answered in collect(engine, renderer, questions, samples, sampling, seed=0):
        name = answered.example.key.task
        texts = [completion.text for completion in answered.completions]
        scores = score_strictly(suites[name], answered.example, texts)
        judged = [reward for named in scores if (reward := total_reward(named)) is not None]
        counts[name].append((len(judged), sum(reward >= 1.0 for reward in judged)))
        cut[name] += [
            one.finish == "length" and suites[name].ended(one.text) == one.text
            for one in answered.completions
        ]
    return {name: _score(counts[name], cut[name], samples) for name in suites}


def _score(counts: Sequence[tuple[int, int]], cut: Sequence[bool], samples: int) -> SuiteScore:
    """`counts`: judged and right answers of each question."""
    chances = {
        k: [pass_at_k(judged, right, k) for judged, right in counts if judged >= k]
        for k in powers_of_two(samples)
    }
    return SuiteScore(
        pass_at={k: mean_or_none(values) for k, values in chances.items()},
        standard_error={
            k: stdev(values) / sqrt(len(values)) if len(values) > 1 else None for k, values in chances.items()
        },
        answered=len(counts),
        judged=sum(judged > 0 for judged, _ in counts),
        cut_share=mean_or_none(cut),
    )


def _result(
    suite: Suite,
    prompting: Prompting,
    questions: SuiteQuestions,
    trained: Sequence[str],
    before: SuiteScore,
    after: SuiteScore | None,
) -> SuiteResult:
    return SuiteResult(
        name=suite.name,
        version=suite.version,
        format=suite.format.name,
        prompting=suite.format.describe(prompting),
        rows=len(suite.rows),
        asked=len(questions.asked),
        unknown=questions.unknown,
        trained_on=any(holds(suite.path, spec) for spec in trained),
        before=before,
        after=after,
    )


def holds(suite: Path, spec: str) -> bool:
    """Returns True if a task that a policy was trained on is one of the files of a suite, options aside.

    >>> holds(Path("/data/gsm8k"), "/data/gsm8k/test.jsonl?answer=answer"), holds(Path("/data/a"), "rev")
    (True, False)
    """
    file = Path(spec.partition("?")[0]).expanduser()
    return file.name.endswith(SUFFIXES) and file.resolve().is_relative_to(suite)


def _with_long_prompts(config: Config) -> Config:
    rollout = config.rollout
    longest = max(rollout.max_prompt_tokens, MIN_PROMPT_TOKENS)
    return config.model_copy(update={"rollout": rollout.model_copy(update={"max_prompt_tokens": longest})})
