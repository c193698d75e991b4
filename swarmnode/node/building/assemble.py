"""The parts of a node are built from its settings.

config -> [start_tasks] -> tasks: built-in ones here, those of files in processes that end with the run
config, paths -> [load_policy] -> LocalPolicy -> machine_memory.py, offline.py
              -> [build_learner] -> PolicyLearner -> run.py
              -> [build_network] -> NetworkParts -> run.py

torch is imported by the functions that need it, so that a mistyped task or a busy port is reported at once.
"""

import hashlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from swarmnode.errors import ConfigError, ModelError
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import STRANGERS_TIMEOUT_S, ExchangeSettings
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.limits import MAX_GROUP_SIZE, PLAY_S
from swarmnode.families.family import refuse_at_sight
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.hardware import find_card
from swarmnode.machine.installing import how_to_install
from swarmnode.machine.storage import Paths, builtin_folder
from swarmnode.models import find_model, read_config
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.finding.seed_addresses import Seeds, read_seeds
from swarmnode.network.host import Host
from swarmnode.network.multiaddr import is_relayed, parse_address, scope_of, split_peer
from swarmnode.network.private.private_host import PrivateHost
from swarmnode.network.private.private_swarm import PrivateSwarm
from swarmnode.network.private.swarm_record import file_of, record_of
from swarmnode.network.streams import StreamHost, Transport
from swarmnode.node.learner import Overlap
from swarmnode.node.node import NetworkParts
from swarmnode.registry import find
from swarmnode.settings.config import Config, NetworkConfig, PolicyConfig, TasksConfig
from swarmnode.tasks.data_settings import specs_of
from swarmnode.tasks.loader import load_tasks
from swarmnode.tasks.task import Isolated, Task
from swarmnode.training.rules.rules import groups_wanted, rule_of, uses_library

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarmnode.model.base_model import LoadedModel
    from swarmnode.model.policy import Policy
    from swarmnode.node.policy_learner import PolicyLearner, TrainJointly
    from swarmnode.rollout.engine import Engine
    from swarmnode.rollout.renderer import Renderer
    from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
    from swarmnode.training.forward import Forward

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is being done)."""


ANYWHERE = "0.0.0.0"
"""Listening on every interface."""


@dataclass(frozen=True, slots=True)
class LocalPolicy:
    """A policy, the engine that samples from it, and the place of its checkpoints."""

    base: "LoadedModel"
    policy: "Policy"
    engine: "Engine"
    renderer: "Renderer"
    store: "CheckpointStore"


def start_tasks(stack: ExitStack, config: TasksConfig, home: Path | None = None) -> dict[str, Task]:
    """Load the tasks by name; the stack ends their processes. `home`: where the node lives. Raises
    TaskError."""
    load = partial(_isolate, config=config, home=home)
    tasks = {task.name: task for task in load_tasks(specs_of(config), load)}
    for task in tasks.values():
        if isinstance(task, Isolated):
            stack.enter_context(task)
    return tasks


def tasks_for_strangers(stack: ExitStack, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The same tasks for judging what others sent: an answer that hangs a reward holds up none of our own."""
    beside: dict[str, Task] = {}
    for name, task in tasks.items():
        if isinstance(task, Isolated):
            task = stack.enter_context(task.for_strangers(STRANGERS_TIMEOUT_S, PLAY_S))
        beside[name] = task
    return beside


def _isolate(spec: str, config: TasksConfig, home: Path | None) -> Task:
    from swarmnode.tasks.processes.isolated_task import isolate

    return isolate(
        spec,
        config.score_timeout_s,
        unconfined=config.sandbox == "optional",
        workers=config.workers,
        memory_mb=config.memory_mb,
        turn_timeout_s=config.turn_timeout_s,
        home=home,
    )


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
    """Load (or, for tiny, build) the base model and put a new adapter on it. The engine can serve so many
    `policies` at once, each with as many rows as one alone would have. Unless it `trains`, answers may be set
    to be longer than the model takes."""
    if find_spec("torch") is None or find_spec("peft") is None:
        raise ModelError("torch and peft are not installed", hint=how_to_install("train"))
    if model != "tiny":
        from swarmnode.model.model_hub import only_from_disk

        only_from_disk(find_model(model))
        refuse_at_sight(config.rollout.engine, read_config(model), config.policy.quantization)
    import torch

    from swarmnode.extensions.native.compiler import keep_in
    from swarmnode.model.base_model import load_base_model
    from swarmnode.model.policy import Policy, look_ahead
    from swarmnode.rollout.engine_choice import make_engine
    from swarmnode.training.losses import loss_of

    # What cannot be imported is refused before anything is loaded.
    loss_of(config.training.loss)
    rule_of(config.exchange.rule)
    card = find_card(config.policy.device)
    if card.problem:
        logger.warning("%s; this node runs on the CPU. %s", card.problem, card.advice)
    torch.set_num_threads(config.policy.threads)
    keep_in(paths.cache / "native")
    source = str(_tiny(paths, progress)) if model == "tiny" else model
    look_ahead(config, source, policies=policies)
    base = load_base_model(source, config.policy)
    engine, reason = make_engine(
        base.model,
        base.eos_token_ids,
        config.rollout.slots * policies,
        max_length=_longest_sequence(config, base) if trains else _within(config, base.max_positions),
        kind=config.rollout.engine,
        source=find_model(source),
        lora_rank=config.policy.lora_rank,
        policies=policies,
    )
    logger.info("rollout engine: %s", reason)
    policy = Policy(base, config.policy, seed)
    logger.info("LoRA changes %s", policy.targets.describe())
    store = checkpoint_store(config, model, paths, base)
    renderer = renderer_of(config.policy, base.tokenizer, base.eos_token_ids)
    return LocalPolicy(base, policy, engine, renderer, store)


def renderer_of(
    config: PolicyConfig, tokenizer: "PreTrainedTokenizerBase", eos_token_ids: Sequence[int]
) -> "Renderer":
    """What reads prompts and writes answers of a model as the settings say."""
    from swarmnode.rollout.renderer import Renderer

    return Renderer(tokenizer, eos_token_ids, config.chat_template, raw_prompts=config.raw_prompts)


def checkpoint_store(
    config: Config,
    model: str,
    paths: Paths,
    base: "LoadedModel",
    tasks: Mapping[str, Task] | None = None,
    *,
    tells: bool = True,
) -> "CheckpointStore":
    """The checkpoints of the run that trains a policy on this base and these tasks, said (`tells`) where it
    is not plainly the one before. `tasks` None: of the run that an evaluation is of. Raises CheckpointError.
    """
    from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
    from swarmnode.training.checkpoints.run_folders import choose_run, newest_run, runs_in

    open_run = partial(
        CheckpointStore,
        paths.checkpoints,
        Path(model).name,
        base.fingerprint,
        keep=config.node.keep_checkpoints,
    )
    known, named, old = runs_in(paths.checkpoints), config.node.run, open_run()
    if tasks is None:
        return open_run(run=newest_run(known, base.fingerprint, named=named) or "")
    versions = {name: task.version for name, task in tasks.items()}
    choice = choose_run(known, base.fingerprint, versions, named=named, old_name=old.folder.name)
    if choice.reason and tells:
        logger.info("%s", choice.reason)
    return open_run(run=choice.name)


def _longest_sequence(config: Config, base: "LoadedModel") -> int:
    return longest_sequence(config, base.name, base.max_positions)


def longest_sequence(config: Config, model: str, limit: int | None) -> int:
    """Prompt and completion as the settings bound them, within the `limit` that the model was made for."""
    rollout = config.rollout
    if limit is not None and rollout.max_tokens >= limit:
        raise ConfigError(
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt:"
            f" {model} takes {limit} tokens in all",
            hint=f"try --set rollout.max_tokens={limit // 2}",
        )
    return _within(config, limit)


def _within(config: Config, limit: int | None) -> int:
    wanted = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return wanted if limit is None else min(wanted, limit)


def _longest_prompt(config: Config, base: "LoadedModel") -> int:
    """The longest prompt that leaves room for a whole completion, as the engine has it."""
    return _longest_sequence(config, base) - config.rollout.max_tokens


def build_learner(
    config: Config,
    local: LocalPolicy,
    tasks: Mapping[str, Task],
    *,
    author: str,
    seed: int,
    overlap: Overlap,
    forward: "Forward",
    train_jointly: "TrainJointly | None" = None,
    tasks_of_others: Mapping[str, Task] | None = None,
) -> "PolicyLearner":
    """The learning half of the node that `author` names. `train_jointly`: how it trains when not alone.
    `tasks_of_others`: as strangers' answers are judged."""
    make: type[PolicyLearner] = find("learner", config.node.learner)
    return make(
        config,
        local.policy,
        local.engine,
        local.renderer,
        tasks,
        local.store,
        author=author,
        seed=seed,
        overlap=overlap,
        forward=forward,
        train_jointly=train_jointly,
        tasks_of_others=tasks_of_others,
    )


def build_network(
    config: Config,
    paths: Paths,
    key: NodeKey,
    port: int,
    tasks: Mapping[str, Task],
    local: LocalPolicy,
    neighbourhood: Neighbourhood,
) -> NetworkParts:
    """Host, exchange and discovery, not yet started. `neighbourhood`: of the policies of this process."""
    host = build_host(config, paths, port)
    exchange = build_exchange(
        config,
        host,
        key,
        tasks,
        local.renderer,
        family=local.base.family,
        parameters=local.base.parameters,
        longest_prompt=_longest_prompt(config, local.base),
        neighbourhood=neighbourhood,
        record=paths.exchange_record,
        library=paths.library,
    )
    return NetworkParts(host, exchange, build_discovery(config, paths, host))


def build_host(config: Config, paths: Paths, port: int) -> StreamHost:
    """The node's place in the network, not yet started: a private one where its home has the swarm's key."""
    network, name = config.network, config.swarm.name
    transport: Transport = find("transport", network.transport)
    host = transport(
        paths.identity,
        listen=(f"/ip4/{network.listen}/tcp/{port}",),
        announce=network.announce,
        map_port=network.map_port,
        relays=relays_of(config, paths),
        relay_for_others=bool(network.relay_for_others),
    )
    if record_of(paths.swarms, name) is None:
        return host
    return PrivateHost(host, PrivateSwarm(file_of(paths.swarms, name), paths.met_members(name)))


def relays_of(config: Config, paths: Paths) -> tuple[str, ...] | None:
    """Return who takes connections for us; empty: nobody, but we dial such addresses; None: neither.

    Names in the DNS are not looked up for it: the daemon wants its relays at its start."""
    network = config.network
    wanted = network.relays
    if network.relay_for_others or wanted == ("none",) or (wanted == ("auto",) and not config.pipeline.name):
        return None
    if wanted == ("auto",):
        public = any(scope_of(f"/ip4/{ip}") == "public" for ip in _own_ips(network))
        wanted = () if public or network.announce or network.map_port else ("seeds",)
    if wanted != ("seeds",):
        return wanted
    record = record_of(paths.swarms, config.swarm.name)
    seeds = (*seeds_of(network).addresses, *(record.seeds if record is not None else ()))
    return tuple(dict.fromkeys(seed for seed in seeds if not is_relayed(seed)))


def _own_ips(network: NetworkConfig) -> Iterator[str]:
    """Yield the IPv4 addresses that we listen on."""
    if network.listen != ANYWHERE:
        yield network.listen
        return
    for addresses in psutil.net_if_addrs().values():
        yield from (address.address for address in addresses if address.family == socket.AF_INET)


def build_discovery(config: Config, paths: Paths, host: Host) -> Discovery:
    """What finds and keeps the peers of the swarm."""
    network, book = config.network, PeerBook.load(paths.peers)
    namespace = f"/swarmnode/1/{config.swarm.name}"
    seeds, record = seeds_of(network), record_of(paths.swarms, config.swarm.name)
    return Discovery(
        host,
        book,
        seeds.addresses if record is None else (*seeds.addresses, *record.seeds),
        namespace,
        names=seeds.names,
        mdns=network.mdns and (network.listen == ANYWHERE or scope_of(f"/ip4/{network.listen}") == "lan"),
        mdns_interfaces=_interfaces(network),
        asks_router=network.map_port,
    )


def build_exchange(
    config: Config,
    host: Host,
    key: NodeKey,
    tasks: Mapping[str, Task],
    renderer: "Renderer",
    *,
    family: str,
    parameters: int,
    longest_prompt: int,
    neighbourhood: Neighbourhood | None = None,
    record: Path | None = None,
    library: Path | None = None,
) -> Exchange:
    """The sharing of rollouts of a policy of this family and size. `library`: the file of its library."""
    return Exchange(
        host,
        key,
        tasks=tasks,
        encode=renderer.encode_completion,
        encode_turns=renderer.encode_turns,
        prompt_ids=renderer.prompt_ids,
        settings=replace(
            exchange_settings(config, longest_prompt),
            publishers=host.may_publish if isinstance(host, PrivateHost) else None,
        ),
        model_family=family,
        model_size=parameters,
        neighbourhood=neighbourhood,
        record=record,
        shelf=Shelf(library) if library is not None and uses_library(config) else None,
    )


def exchange_settings(config: Config, longest_prompt: int) -> ExchangeSettings:
    """The exchange's settings out of the node's: of a peer's group we train on as much as of two of ours."""
    wanted = groups_wanted(config)
    return ExchangeSettings(
        swarm=config.swarm.name,
        upload_bytes_per_s=config.exchange.upload_mb_per_s * 1e6,
        answers_per_group=min(2 * config.rollout.group_size, MAX_GROUP_SIZE),
        max_prompt_tokens=longest_prompt,
        max_completion_tokens=config.rollout.max_tokens,
        buffer_groups=config.exchange.buffer_groups,
        prefetch_groups=wanted,
        fetch_concurrency=max(4, min(wanted, 16)),
        private=config.tasks.private,
    )


def _interfaces(network: NetworkConfig) -> tuple[str, ...]:
    """Where multicast DNS looks: in every local network, or only where we listen."""
    return () if network.listen == ANYWHERE else (network.listen,)


def seeds_of(network: NetworkConfig) -> Seeds:
    """Return whom to dial first. Raises NetworkError, ConfigError for what names nobody."""
    return read_seeds(network.seeds, builtin_folder("configs") / "seeds.txt")


def seed_of(config: Config, peer_id: str) -> int:
    """The seed that is set, else one of this node's own: strangers should not all ask the same questions."""
    if config.node.seed is not None:
        return config.node.seed
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") >> 1


def check_addresses(network: NetworkConfig) -> None:
    """Raises NetworkError for a seed, relay or announced address that is none, before any work is done."""
    seeds_of(network)
    for relay in network.relays:
        if network.relays not in (("auto",), ("seeds",), ("none",)):
            split_peer(relay)
    for address in network.announce:
        parse_address(address)


def _tiny(paths: Paths, progress: Progress) -> Path:
    from swarmnode.model.demonstration.tiny import build_tiny

    return build_tiny(paths.models, progress=progress)
