"""swarmnode as a library: a node, an evaluation and a trained policy from a script or a notebook.

script -> [Node, run, evaluate, load_policy, load_adapter] -> config_layers.py -> node/building/run.py,
    node/commands/offline.py

A node here is the same as under `swarmnode join`: same settings, homes, checkpoints and exchange. A script
can also pass in what a command line cannot name: functions, objects, callbacks. `swarmnode` exports these
names (`import swarmnode as sn`); nothing is loaded until one is used.
"""

import asyncio
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, ParamSpec, Self, cast, overload

from swarmnode.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    RequestRefused,
    SwarmnodeError,
    TaskError,
)
from swarmnode.machine.storage import resolve_paths
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
from swarmnode.node.showing.monitors import RunInfo as RunInfo
from swarmnode.node.showing.node_status import NodeStatus, Summary
from swarmnode.node.showing.screen import LOG_FILE, Screen
from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings, advice_for_argument, flat, load_settings
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
from swarmnode.training.checkpoints.run_folders import with_trained_model
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
"""A prompt: a string, or messages that end with a user message."""

P = ParamSpec("P")


class Node:
    """One node, as started by `swarmnode join`.

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
        """Checks the arguments; nothing is loaded yet.

        `task`: the questions (None: the built-in tasks). `reward`: the judge, in place of the task's own.
        `tools`: functions that the policy may call. `environment`: a class (or a function without arguments)
        that makes the environment of an episode and may supply its own questions (docs/environments.md).
        `eval_dataset`: rows to measure on, all of them; no row of `task` is held out then. `demonstrations`:
        right answers to start from, for a task on which the policy is never right by itself: a function of
        the example, a mapping of prompts to texts, or rows with a column `demonstration`. The task judges
        them; they are neither shown in a prompt nor published. `model`: a name, a folder, or a loaded
        transformers causal LM, with its `tokenizer` if its name leads to none. `rounds` (of the run in all,
        across restarts), `run` (its name; None: the run of this model, task and reward, or a new one if these
        have changed), `peers` (addresses to dial) and `home` are the options of `swarmnode join`; `settings`
        holds any other by its full name: {"training.learning_rate": 1e-3}. `on_round` is called with the
        status after every round, in the thread that runs the node; an exception in it ends the run.
        `monitors`: trackers by the names that node.monitors takes, or objects (docs/metrics.md); an exception
        in one does not end the run. `fresh`: start over. `log`: write the node's log to stderr. Raises
        ConfigError and TaskError for invalid settings and tasks.
        """
        for name in unknown:
            raise ConfigError(
                f"unknown argument {name!r}", hint=advice_for_argument(name, signature(Node).parameters)
            )
        for name, given in ("peers", peers), ("monitors", monitors):
            if isinstance(given, str):
                raise ConfigError(
                    f"{name} must be a list, got {given!r:.80}", hint=f"pass {name}=[{given!r:.80}]"
                )
        flags: dict[str, Any] = {
            "network.seeds": tuple(peers) or None,
            "node.rounds": rounds,
            "node.run": run,
        }
        if named := tuple(one for one in monitors if isinstance(one, str)):
            flags["node.monitors"] = named
        if on_round is not None and not callable(on_round):
            raise ConfigError(
                f"on_round is not callable: {on_round!r:.80}", hint="pass a function that takes the status"
            )
        self._monitors = [checked_monitor(one) for one in monitors if not isinstance(one, str)]
        self._settings = _settings_of_trained(
            home, preset, model, {**flags, **_names(task)}, settings, tokenizer
        )
        refuse_untrained(task)
        rewards = rewards_of(reward)
        # An invalid task is refused here and not in `run`.
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
        """The node's status, as on the status page. None: the node has not started."""
        return self._status

    @property
    def config(self) -> Config:
        """The settings, all layers merged."""
        return self._settings.config

    @property
    def home(self) -> Path | None:
        """Folder with everything that the node keeps; pass it as `home=` again. None: the XDG folders, for a
        node that was given no home."""
        return self._settings.paths.home

    @property
    def policy(self) -> "TrainedPolicy":
        """The policy of the run's newest checkpoint, to generate from; a running node has its own copy. It
        stays in memory until it is closed, or a newer one is asked for. Raises CheckpointError if there is no
        checkpoint yet."""
        if self.status is None and not self.config.node.run:
            raise CheckpointError(
                "the node has not started, so its run is not known yet",
                hint="call run() first, name the run (run=...), or use swarmnode.load_policy(home=...)",
            )
        saved = None if self.status is None else self.status.checkpoint.round
        if self._policy is None or self._policy[0] != saved or self._policy[1].closed:
            self._policy = None  # The former one is closed before the next one is loaded, if nobody uses it.
            self._policy = saved, _load(self._settings_of_run(), best=False, base=False)
        return self._policy[1]

    def run(self) -> Summary:
        """Runs to the end and returns a summary. Ctrl-C and `stop` shut down cleanly, with a checkpoint.
        In a notebook, whose thread already has an event loop, the node runs in a separate thread."""
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
        """Runs as `run` does, without blocking the event loop: the node has its own threads and event loop.
        If the caller is cancelled, the node shuts down cleanly first."""
        running = asyncio.get_running_loop().run_in_executor(None, lambda: self._run(signals=False))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            await running
            raise

    def stop(self) -> None:
        """Shuts the node down cleanly, with a checkpoint. May be called from any thread and `on_round`."""
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
            raise ConfigError("this node is already running", hint="give a second node its own home")
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
            # The message says what to do; our own traceback is of no use to a script, but the cause is.
            raise error.with_traceback(None) from error.__cause__
        finally:
            self._request_stop, self._fresh, self._stopping = None, False, False
            self._running.release()


class TrainedPolicy:
    """A policy of a checkpoint, with an engine to generate from it.

    >>> with load_policy(home=node.home) as policy:                 # doctest: +SKIP
    ...     policy.generate("last abcd=")
    'd'
    """

    def __init__(self, opened: ExitStack, local: "LocalPolicy", config: Config, round: int | None) -> None:
        """`opened`: closes the engine, at the latest when Python ends or nobody has this policy any more."""
        self._end = weakref.finalize(self, opened.close)
        self._local: LocalPolicy | None = local
        self._config = config
        self.round = round
        """The round of the checkpoint; None: the base model as it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine and releases the model's memory. A closed policy generates nothing more; closing it
        again has no effect."""
        self._local = None
        self._end()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._local is None

    @property
    def local(self) -> "LocalPolicy":
        """Base, adapter, engine and tokenizer. Internal: not part of the stable API."""
        if self._local is None:
            raise ModelError("this policy is closed", hint="load it again: swarmnode.load_policy(...)")
        return self._local

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
        """Returns one completion of each prompt (a string, or messages): a string for one prompt, a list for
        a list.

        `temperature` and `max_tokens` default to those used in training; temperature 0 always takes the
        likeliest token. The same `seed` gives the same samples; None: different ones each time. Raises
        TaskError for invalid messages, and ModelError for what the engine refuses, such as too long a prompt,
        and if the policy is closed.
        """
        if isinstance(prompt, Mapping | bytes) or not isinstance(cast(object, prompt), Iterable):
            raise TaskError(
                f"not a prompt: {prompt!r:.80}",
                hint="pass a string, messages that end with a user message, or a list of either",
            )
        parts = prompt if isinstance(prompt, str) else list(prompt)
        is_one = isinstance(parts, str) or any(isinstance(part, Mapping) for part in parts)
        given = [parts] if is_one else parts
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
                raise ModelError(f"cannot answer {text!r:.60}: {error.message}", hint=error.hint) from error
        asked = [Example(ExampleKey("ask", "", 0, number), text) for number, text in enumerate(prompts)]
        answered = collect(engine, renderer, asked, 1, sampling, seed=seed)
        texts = {one.example.key.index: one.completions[0].text for one in answered}
        return texts[0] if is_one else [texts[number] for number in range(len(prompts))]


def _run_of(node: Callable[P, Node]) -> Callable[P, Summary]:
    """Makes `run`, with the parameters of a Node for editors, type checkers and `help`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> Summary:
        """Runs a node to the end: `Node(task, reward, ...).run()`, with all arguments of Node."""
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
    """Returns the mean reward of the newest checkpoint, the best one, or the `base` model on held-out
    examples, as `swarmnode eval` does. `task`: None for the named tasks it was trained on; all given rows are
    used, or with several splits those not for training. `run`: its name (None: the one written to last).

    Raises CheckpointError if there is nothing to measure.
    """
    keywords = {"node.run": run, **_names(task)}
    chosen = _settings_of_trained(home, preset, model, keywords, settings, tokenizer)
    measured = None if tools is not None or environment is not None else measured_rows(task)
    rewards = rewards_of(reward)
    made = _task_around(() if measured else task, rewards, tools, environment, measured, chosen.config)
    with ExitStack() as stack:
        tasks = tasks_of(stack, made or task, () if made else rewards, chosen.config)
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
    """Returns the policy of the newest checkpoint (or the best, or the `base` model), to generate from. Its
    engine and the model stay in memory until it is closed: use it in a `with` statement, or call `close`.
    `run`: its name (None: the run written to last). Raises CheckpointError if there is no checkpoint."""
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
    """Returns the base with the trained adapter as a PEFT model, and the tokenizer, for transformers.
    `run` as in `load_policy`. Raises CheckpointError if there is no checkpoint."""
    with load_policy(model=model, home=home, run=run, preset=preset, settings=settings, best=best) as loaded:
        return loaded.local.policy.peft_model, loaded.local.base.tokenizer


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
    settings = dict(flat(settings or {}))
    for name, given in {"policy.model": model, **keywords}.items():
        if given and name in settings:
            raise ConfigError(
                f"settings[{name!r}] is also given as an argument: {given!r:.80}",
                hint="leave out one of them",
            )
    if not isinstance(cast(object, home), str | Path | None):
        raise ConfigError(
            f"home must be a path, got {home!r:.80}", hint="pass the path of a folder, or leave it out"
        )
    folder = None if home is None else Path(home)
    named, loaded = (None, None) if model is None else (str(model), None)
    if model is not None and not isinstance(model, str | Path):
        from swarmnode.model.model_folder import folder_of_model

        loaded = folder_of_model(model, tokenizer, resolve_paths(folder).models)
        named = str(loaded)
    elif tokenizer is not None:
        raise ConfigError(
            "tokenizer= needs a loaded model", hint="pass both objects, or a folder that has both"
        )

    def load(trained: str | None) -> Settings:
        flags = {"policy.model": trained or named, **keywords, **settings}
        return load_settings(home=folder, preset=preset, flags=flags, flags_from="the script")

    found = with_trained_model(load)
    return (
        found
        if loaded is None
        else replace(found, model_reason="passed in by the script, saved in that folder")
    )


def rewards_of(reward: RewardSpec | Sequence[RewardSpec] | None) -> Sequence[RewardSpec]:
    """Returns one reward, several or none as a list. Raises TaskError for an object that is not a reward."""
    if reward is None:
        return []
    if isinstance(reward, str) or callable(reward):
        return [reward]
    if not isinstance(cast(object, reward), Iterable):
        raise TaskError(
            f"not a reward: {reward!r:.80}",
            hint="pass a function, the name of one, or a list of them; leave it out for the task's own judge",
        )
    return list(reward)


class _Watch:
    """A watcher that passes a node's status on to its Node object."""

    def __init__(self, seen: RoundCallback, on_round: RoundCallback | None) -> None:
        self._seen, self._on_round = seen, on_round

    def see(self, event: Occasion, status: NodeStatus) -> None:
        self._seen(status)
        if event != "round" or self._on_round is None:
            return
        try:
            self._on_round(status)
        except (OSError, StopIteration) as error:
            # No coroutine raises a StopIteration, and a watcher's OSError means that its output is closed.
            raise RuntimeError(f"on_round raised {error!r}") from error

    def close(self) -> None:
        pass


@contextmanager
def _interrupts(stop: Callable[[], None], wanted: bool) -> Generator[None]:
    """Context in which Ctrl-C shuts the node down cleanly; a second one raises KeyboardInterrupt, as it does
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
    """Returns the task made of the script's objects. None: a name or the settings determine it. Raises
    TaskError."""
    named = task_names(task)
    if named and (tools is not None or environment is not None or evaluation is not None):
        hint = "pass its examples as a list or a function"
        if evaluation is not None:
            hint += "; to measure a data set on another, name it: FILE?evaluation=FILE"
        raise TaskError(
            f"a named task ({', '.join(named)}) takes no tools, environment or eval_dataset",
            hint=hint,
        )
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
    with ExitStack() as stack:
        loading = load_checkpoint(settings, base=base, best=best, screen=Screen(shows=False), purpose="load")
        local, checkpoint = stack.enter_context(loading)
        config = with_room(settings.config, local)
        round = checkpoint and checkpoint.state.counters.round
        return TrainedPolicy(stack.pop_all(), local, config, round)


def _check_alone(config: Config) -> None:
    if config.node.policies > 1 or config.pipeline.name:
        raise ConfigError(
            "a Node in a script trains one policy on a whole model",
            hint="leave out node.policies and pipeline.name, or use `swarmnode join`",
        )
