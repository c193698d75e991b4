"""swarmnode as a library: a node, an evaluation and a trained policy from a script or a notebook.

script -> [Node, run, evaluate, load_policy, load_adapter] -> config_layers.py -> node/building/run.py,
    node/commands/offline.py

A node does here what it does under `swarmnode join`: the same settings, homes, checkpoints and exchange. What
is passed in is what a command line cannot name: functions, objects, callbacks. `swarmnode` itself has these
names (`import swarmnode as sn`); until one is used, nothing is loaded.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, ParamSpec, cast, overload

from swarmnode.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    RequestRefused,
    SwarmnodeError,
    TaskError,
)
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.policies import with_trained_model
from swarmnode.node.building.run import Company, prepared, serve
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.node.commands.offline import (
    OfflineEvaluation,
    as_trained,
    evaluate_offline,
    load_checkpoint,
    with_room,
)
from swarmnode.node.showing.board import Occasion
from swarmnode.node.showing.monitors import Monitor, checked_monitor
from swarmnode.node.showing.node_status import NodeStatus, Summary
from swarmnode.node.showing.screen import LOG_FILE, Screen
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings, advice_for_argument, load_settings
from swarmnode.tasks.drawing.demonstrations import Demonstrations, GivenDemonstrations
from swarmnode.tasks.file_task import Draw
from swarmnode.tasks.judging.rewards import named_rewards, with_weights
from swarmnode.tasks.kinds.rewarded_task import rewarded
from swarmnode.tasks.kinds.script_objects import (
    RewardSpec,
    Rows,
    as_task,
    measured_rows,
    refuse_untrained,
    task_names,
)
from swarmnode.tasks.rows import user_prompt
from swarmnode.tasks.specs import judged_elsewhere
from swarmnode.tasks.task import Task
from swarmnode.training.evaluation import collect
from swarmnode.types import Example, ExampleKey

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from swarmnode.node.building.local_policy import LocalPolicy
GivenTask = str | Path | Task | Draw | Rows
"""A task. By name, as `--task` takes it: a file, a data set, an import path; a list of names; a function
`examples(seed)`; rows: a list, a Dataset, a DataFrame, a generator, several splits; an object with name,
version, examples and score."""

RoundCallback = Callable[[NodeStatus], object]

Asked = str | Sequence[Mapping[str, str]]
"""A prompt as a text, or as messages that end with one of the user."""

P = ParamSpec("P")


class Node:
    """One node, like that of `swarmnode join`.

    >>> node = Node(task=examples, reward=reward, rounds=20)    # doctest: +SKIP
    >>> node.run().reward_last                                  # doctest: +SKIP
    0.84
    >>> node.policy.generate("last abcd=")                      # doctest: +SKIP
    'd'
    """

    def __init__(
        self,
        task: GivenTask | None = None,
        reward: RewardSpec | Sequence[RewardSpec] | None = None,
        *,
        model: "str | Path | PreTrainedModel | None" = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        rounds: int | None = None,
        run: str | None = None,
        peers: Sequence[str] = (),
        home: Path | str | None = None,
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        on_round: RoundCallback | None = None,
        monitors: Sequence[str | Monitor] = (),
        fresh: bool = False,
        log: bool = True,
        tools: Sequence[object] | None = None,
        environment: object = None,
        eval_dataset: Rows | None = None,
        demonstrations: GivenDemonstrations | None = None,
        **unknown: Never,
    ) -> None:
        """Loads nothing yet.

        `task`: the questions (None: the built-in tasks). `reward`: the judge in place of the task's own.
        `tools`: functions that the policy may call; `environment`: a class (or a function without arguments)
        that makes the environment of an episode, which may bring its own questions (docs/environments.md).
        `eval_dataset`: rows that it is measured on, whole; then no row of `task` is held out.
        `demonstrations`: right answers to begin with, where the policy is never right by itself: a function
        of the example, a mapping of prompts to texts, or rows with a column `demonstration`. The task judges
        them; none is shown in a prompt, and none is published. `model`: a name, a folder, or a causal LM of
        transformers that is loaded, with its `tokenizer` where its name does not lead to one. `rounds` (of
        the run, over restarts), `run` (its name; None: that of this model, task and reward, a new one where
        these have changed), `peers` (addresses to dial) and `home` are the options of `swarmnode join`;
        `settings` any other, by its full name: {"training.learning_rate": 1e-3}. `on_round` is called with
        the status after every round, in the thread that runs the node; what it raises ends the run.
        `monitors`: trackers by the names that node.monitors takes, or objects (docs/metrics.md); what they
        raise ends nothing. `fresh`: start over. `log`: write the node's story to stderr. Raises ConfigError
        and TaskError for settings and tasks that are not possible.
        """
        for name in unknown:
            raise ConfigError(
                f"a node takes no {name!r}", hint=advice_for_argument(name, signature(Node).parameters)
            )
        for name, given in ("peers", peers), ("monitors", monitors):
            if isinstance(given, str):
                raise ConfigError(f"{name}={given!r:.80} is no list", hint=f"pass {name}=[{given!r:.80}]")
        flags: dict[str, Any] = {
            "network.seeds": tuple(peers) or None,
            "node.rounds": rounds,
            "node.run": run,
        }
        if named := tuple(one for one in monitors if isinstance(one, str)):
            flags["node.monitors"] = named
        if on_round is not None and not callable(on_round):
            raise ConfigError(
                f"on_round={on_round!r:.80} cannot be called", hint="pass a function of the status"
            )
        self._monitors = [checked_monitor(one) for one in monitors if not isinstance(one, str)]
        self._settings = _settings_of_trained(
            home, preset, model, {**flags, **_names(task)}, settings, tokenizer
        )
        refuse_untrained(task)
        rewards = rewards_of(reward)
        # What is no task is refused here and not in `run`.
        made = _task_around(task, rewards, tools, environment, eval_dataset, self.config)
        if made is not None:
            task, rewards = made, ()
        _check_alone(self._settings.config)
        self._task, self._rewards = task, rewards
        self._demonstrations = Demonstrations(demonstrations)
        self._on_round = on_round
        self._fresh = fresh
        self._log = log
        self._request_stop: Callable[[], None] | None = None
        self._stopping = False
        self._running = threading.Lock()
        self._policy: tuple[int | None, TrainedPolicy] | None = None
        self._status: NodeStatus | None = None

    @property
    def status(self) -> NodeStatus | None:
        """The node's status, as the status page has it. None: before its first moment."""
        return self._status

    @property
    def config(self) -> Config:
        """The settings, all layers merged."""
        return self._settings.config

    @property
    def home(self) -> Path | None:
        """Folder with everything that the node keeps, to pass as `home=` again. None: the folders of XDG, for
        a node without a home of its own."""
        return self._settings.paths.home

    @property
    def policy(self) -> "TrainedPolicy":
        """Policy of the newest checkpoint of the run, to generate from; loaded beside that of a running node.
        Raises CheckpointError if there is none yet."""
        if self.status is None and not self.config.node.run:
            raise CheckpointError(
                "the node has not begun: which run of its home is its own shows then",
                hint="call run() first, name the run (run=...), or swarmnode.load_policy(home=...)",
            )
        saved = None if self.status is None else self.status.checkpoint.round
        if self._policy is None or self._policy[0] != saved:
            self._policy = None  # The former one's memory is free before the next one is loaded.
            self._policy = saved, _load(self._settings_of_run(), best=False, base=False)
        return self._policy[1]

    def run(self) -> Summary:
        """Runs to the end and returns a summary. Ctrl-C and `stop` end the run in order, with a checkpoint.
        In a notebook, whose thread has an event loop already, the node runs in a thread of its own."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._run(signals=threading.current_thread() is threading.main_thread())
        with ThreadPoolExecutor(1, thread_name_prefix="node") as thread:
            running = thread.submit(self._run, signals=False)
            try:
                return running.result()
            except KeyboardInterrupt:
                self.stop()
                return running.result()

    async def serve(self) -> Summary:
        """Runs as `run` does, without blocking the event loop: the node computes in threads and has a loop of
        its own. If the caller is cancelled, the node stops in order first."""
        running = asyncio.get_running_loop().run_in_executor(None, lambda: self._run(signals=False))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            await running
            raise

    def stop(self) -> None:
        """Ends the run in order, with a checkpoint. May be called from any thread and from `on_round`."""
        self._stopping = True
        if self._request_stop is not None:
            self._request_stop()

    def _seen(self, status: NodeStatus) -> None:
        self._status = status

    def _settings_of_run(self) -> Settings:
        """Returns the settings with the name of the run that this node trains, once it has begun."""
        if self.status is None:
            return self._settings
        node = self.config.node.model_copy(update={"run": self.status.run})
        return replace(self._settings, config=self.config.model_copy(update={"node": node}))

    def _run(self, *, signals: bool) -> Summary:
        if not self._running.acquire(blocking=False):
            raise ConfigError("this node runs already", hint="a second one needs a home of its own")
        given = self._settings
        screen = Screen(given.paths.logs / LOG_FILE, terminal=False, shows=self._log)
        try:
            with ExitStack() as stack:
                stack.enter_context(_interrupts(self.stop, signals))
                tasks = tasks_of(stack, self._task, self._rewards, self.config)
                run = prepared(
                    given, screen, fresh=self._fresh, tasks=tasks, watch=_Watch(self._seen, self._on_round),
                    monitors=self._monitors, demonstrations=self._demonstrations,
                )  # fmt: skip
                (member,) = stack.enter_context(run)
                self._request_stop = member.request_stop
                if self._stopping:
                    member.request_stop()
                return asyncio.run(serve(member, Company([member], takes_signals=False)))
        except SwarmnodeError as error:
            # It says what to do; where in the node it was noticed is of no use to a script, but its cause is.
            raise error.with_traceback(None) from error.__cause__
        finally:
            self._request_stop, self._fresh, self._stopping = None, False, False
            self._running.release()


class TrainedPolicy:
    """A policy of a checkpoint, with an engine to generate from it."""

    def __init__(self, local: "LocalPolicy", config: Config, round: int | None) -> None:
        self.local = local
        """Base, adapter, engine and tokenizer, for who looks inside: not part of the stable library."""
        self._config = config
        self.round = round
        """The round of the checkpoint; None: the base model as it is."""

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]  to a type checker a text is a sequence, too
        self,
        prompt: Asked,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Asked],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> list[str]: ...
    def generate(
        self,
        prompt: Asked | Sequence[Asked],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> str | list[str]:
        """Returns one completion of each prompt, a text or messages; a text for one of them, a list for a
        list.

        `temperature` and `max_tokens`: as the policy trains, unless given; temperature 0 takes the likeliest
        token. The same `seed` gives the same samples; None: others each time. Raises TaskError for messages
        that are none and ModelError for what the engine refuses, as a prompt that is too long.
        """
        if isinstance(prompt, Mapping | bytes) or not isinstance(cast(object, prompt), Iterable):
            raise TaskError(
                f"{prompt!r:.80} is no prompt",
                hint="pass a text, messages that end with one of the user, or a list of either",
            )
        parts = [prompt] if isinstance(prompt, str) else list(prompt)
        is_one = isinstance(prompt, str) or any(isinstance(part, Mapping) for part in parts)
        given = [prompt] if is_one else parts
        prompts = [user_prompt(one, "generate") for one in given]
        rollout = self._config.rollout
        sampling = SamplingParams(
            rollout.max_tokens if max_tokens is None else max_tokens,
            rollout.temperature if temperature is None else temperature,
            rollout.top_p,
        )
        engine, renderer = self.local.engine, self.local.renderer
        for text in prompts:
            try:
                engine.check(Request("of this prompt", renderer.prompt_ids(text), sampling))
            except RequestRefused as error:
                raise ModelError(f"{text!r:.60} is not answered: {error.message}", hint=error.hint) from error
        asked = [Example(ExampleKey("ask", "", 0, number), text) for number, text in enumerate(prompts)]
        answered = collect(engine, renderer, asked, 1, sampling, seed=seed)
        texts = {one.example.key.index: one.completions[0].text for one in answered}
        return texts[0] if is_one else [texts[number] for number in range(len(prompts))]


def _run_of(node: Callable[P, Node]) -> Callable[P, Summary]:
    """Makes `run`, with the parameters of a Node for editors, type checkers and `help`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> Summary:
        """Runs a node to its end: `Node(task, reward, ...).run()`, with all that a Node takes."""
        return node(*args, **kwargs).run()

    run.__signature__ = signature(node).replace(return_annotation=Summary)  # pyright: ignore[reportFunctionMemberAccess]
    return run


run = _run_of(Node)


def evaluate(
    task: GivenTask | None = None,
    reward: RewardSpec | Sequence[RewardSpec] | None = None,
    *,
    model: "str | Path | PreTrainedModel | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    home: Path | str | None = None,
    run: str | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    base: bool = False,
    best: bool = False,
    greedy: bool = False,
    samples: int = 1,
    passing_reward: float = 1.0,
    tools: Sequence[object] | None = None,
    environment: object = None,
) -> OfflineEvaluation:
    """Returns the mean reward on held-out examples of the newest checkpoint, of the best, or of the `base`
    model; as `swarmnode eval`. `task` None: the named tasks that it was trained on; rows: all of them, and of
    several splits those not for training. `run`: its name (None: the one written to last).

    Raises CheckpointError if there is nothing to measure.
    """
    keywords = {"node.run": run, **_names(task)}
    chosen = _settings_of_trained(home, preset, model, keywords, settings, tokenizer)
    measured = None if tools is not None or environment is not None else measured_rows(task)
    made = _task_around(
        () if measured else task, rewards_of(reward), tools, environment, measured, chosen.config
    )
    with ExitStack() as stack:
        tasks = tasks_of(stack, made or task, () if made else rewards_of(reward), chosen.config)
        return evaluate_offline(
            chosen,
            base=base,
            best=best,
            greedy=greedy,
            samples=samples,
            passing_reward=passing_reward,
            tasks=tasks,
            screen=Screen(shows=False),
            purpose="evaluate",
        )


def load_policy(
    *,
    model: "str | Path | PreTrainedModel | None" = None,
    home: Path | str | None = None,
    run: str | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    base: bool = False,
    best: bool = False,
) -> TrainedPolicy:
    """Returns the policy of the newest checkpoint (or the best, or the `base` model), to generate from. `run`
    None: the run written to last. Raises CheckpointError if there is none."""
    chosen = _settings_of_trained(home, preset, model, {"node.run": run}, settings)
    return _load(chosen, base=base, best=best)


def load_adapter(
    *,
    model: "str | Path | PreTrainedModel | None" = None,
    home: Path | str | None = None,
    run: str | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    best: bool = False,
) -> "tuple[PeftModel, PreTrainedTokenizerBase]":
    """Returns the trained adapter on its base as a PEFT model, and the tokenizer, for code that uses
    transformers. `run` as in `load_policy`. Raises CheckpointError if there is no checkpoint."""
    local = load_policy(model=model, home=home, run=run, preset=preset, settings=settings, best=best).local
    return local.policy.peft_model, local.base.tokenizer


def _settings_of_trained(
    home: Path | str | None,
    preset: str | None,
    model: "str | Path | PreTrainedModel | None",
    keywords: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> Settings:
    """Returns all layers of settings merged, with the script's own on top; without a named model, those of
    the model trained here. A `model` that is loaded is written to a folder of the home. Raises ModelError and
    ConfigError, which it also does for what a keyword and a setting both say."""
    settings = settings or {}
    for name, given in {"policy.model": model, **keywords}.items():
        if given and name in settings:
            raise ConfigError(
                f"settings[{name!r}] is given as an argument, too: {given!r:.80}",
                hint="leave one of them out",
            )
    if not isinstance(cast(object, home), str | Path | None):
        raise ConfigError(f"home={home!r:.80} is no folder", hint="pass its path, or leave it out")
    folder = None if home is None else Path(home)
    named, loaded = (None, None) if model is None else (str(model), None)
    if model is not None and not isinstance(model, str | Path):
        from swarmnode.model.model_folder import folder_of_model

        loaded = folder_of_model(model, tokenizer, resolve_paths(folder).models)
        named = str(loaded)
    elif tokenizer is not None:
        raise ConfigError(
            "a tokenizer comes with a loaded model", hint="pass both, or the folder that has both"
        )

    def load(trained: str | None) -> Settings:
        flags = {"policy.model": trained or named, **keywords, **settings}
        return load_settings(home=folder, preset=preset, flags=flags, flags_from="the script")

    found = with_trained_model(load)
    return found if loaded is None else replace(found, model_reason="the script's own, kept in that folder")


def rewards_of(reward: RewardSpec | Sequence[RewardSpec] | None) -> Sequence[RewardSpec]:
    """Returns one reward, several or none as a list. Raises TaskError for an object that is no reward."""
    if reward is None:
        return []
    if isinstance(reward, str) or callable(reward):
        return [reward]
    if not isinstance(cast(object, reward), Iterable):
        raise TaskError(
            f"reward={reward!r:.80} is no reward",
            hint="pass a function, the name of one, or a list of them; without `reward` a task judges itself",
        )
    return list(reward)


class _Watch:
    """A watcher that passes a node's status on to its Node object."""

    def __init__(self, seen: RoundCallback, on_round: RoundCallback | None) -> None:
        self._seen, self._on_round = seen, on_round

    def see(self, event: Occasion, status: NodeStatus) -> None:
        self._seen(status)
        if event == "round" and self._on_round is not None:
            self._on_round(status)

    def close(self) -> None:
        pass


@contextmanager
def _interrupts(stop: Callable[[], None], wanted: bool) -> Generator[None]:
    """Context in which Ctrl-C stops the node in order; a second one raises KeyboardInterrupt, as it does
    elsewhere."""
    if not wanted:
        yield
        return

    def interrupted(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _names(task: GivenTask | None) -> dict[str, Any]:
    """Returns the setting that names tasks, if the task is a name or a list of names."""
    names = task_names(task)
    return {"tasks.names": names, "tasks.mixes": ()} if names else {}


def _task_around(
    task: GivenTask | None,
    rewards: Sequence[RewardSpec],
    tools: Sequence[object] | None,
    environment: object,
    evaluation: Rows | None,
    config: Config,
) -> Task | None:
    """Returns the task made of the script's objects. None: the settings or a name say it. Raises
    TaskError."""
    named = task_names(task)
    if named and (tools is not None or environment is not None or evaluation is not None):
        hint = "pass its examples as a list or a function"
        if evaluation is not None:
            hint += "; a data set is measured on another by its name: FILE?evaluation=FILE"
        raise TaskError(f"{', '.join(named)} is a task already", hint=hint)
    if named or (task is None and tools is None and environment is None):
        return None
    weights = config.tasks.reward_weights
    return as_task(
        task, rewards, tools=tools, environment=environment, weights=weights, evaluation=evaluation
    )


def tasks_of(
    stack: ExitStack, task: GivenTask | None, rewards: Sequence[RewardSpec], config: Config
) -> dict[str, Task] | None:
    """Returns the tasks that were passed in. None: the settings name them. The stack ends their processes."""
    if task is not None and not task_names(task):
        one = as_task(task, rewards)
        return {one.name: one}
    if not rewards:
        return None
    judges = with_weights(named_rewards(rewards), config.tasks.reward_weights)
    names = tuple(map(judged_elsewhere, config.tasks.names))
    named = config.tasks.model_copy(update={"names": names, "reward": (), "reward_weights": ()})
    return {name: rewarded(one, judges) for name, one in start_tasks(stack, named).items()}


def _load(settings: Settings, *, base: bool, best: bool) -> TrainedPolicy:
    settings = as_trained(settings)
    local, checkpoint = load_checkpoint(
        settings, base=base, best=best, progress=lambda done, total, what: None, purpose="load"
    )
    config = with_room(settings.config, local)
    return TrainedPolicy(local, config, checkpoint and checkpoint.state.counters.round)


def _check_alone(config: Config) -> None:
    if config.node.policies > 1 or config.pipeline.name:
        raise ConfigError(
            "a Node of a script is one policy on a whole model",
            hint="leave out node.policies and pipeline.name, or use `swarmnode join`",
        )
