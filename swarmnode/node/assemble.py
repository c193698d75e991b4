"""From settings to the parts of a node.

config, paths -> [assemble] -> LocalPolicy, PolicyLearner, NetworkParts -> run.py, offline.py

torch is imported by the functions that need it, so that a mistyped task or a busy port is reported at once.
"""

import hashlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.config import Config, NetworkConfig, NodeConfig
from swarmnode.errors import ConfigError, ModelError, PortInUse
from swarmnode.exchange.exchange import Exchange, ExchangeSettings
from swarmnode.exchange.limits import MAX_GROUP_SIZE
from swarmnode.hardware import inspect_machine
from swarmnode.identity.keys import NodeKey
from swarmnode.models import find_model, plan_memory
from swarmnode.network.discovery import Discovery
from swarmnode.network.multiaddr import parse_address, split_peer
from swarmnode.network.p2pd import P2pdHost
from swarmnode.network.peers import PeerBook
from swarmnode.node.node import NetworkParts
from swarmnode.node.overlap import Overlap, decide_overlap
from swarmnode.paths import Paths
from swarmnode.tasks.task import Task

if TYPE_CHECKING:
    from swarmnode.node.policy_learner import PolicyLearner
    from swarmnode.rollout.engine import Engine
    from swarmnode.rollout.renderer import Renderer
    from swarmnode.training.base_model import LoadedModel
    from swarmnode.training.checkpoint import CheckpointStore
    from swarmnode.training.policy import Policy

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is being done)."""


@dataclass(frozen=True, slots=True)
class LocalPolicy:
    """A policy, the engine that samples from it, and the place of its checkpoints."""

    base: "LoadedModel"
    policy: "Policy"
    engine: "Engine"
    renderer: "Renderer"
    store: "CheckpointStore"


def load_policy(
    config: Config, model: str, paths: Paths, progress: Progress, *, seed: int = 0
) -> LocalPolicy:
    """Load (or, for tiny, build) the base model and put a new adapter on it."""
    if find_spec("torch") is None or find_spec("peft") is None:
        raise ModelError("torch and peft are not installed", hint="pip install 'swarmnode[train]'")
    import torch

    from swarmnode.rollout.renderer import Renderer
    from swarmnode.rollout.select import make_engine
    from swarmnode.training.base_model import load_base_model
    from swarmnode.training.checkpoint import CheckpointStore
    from swarmnode.training.policy import Policy

    torch.set_num_threads(config.policy.threads)
    source = str(_tiny(paths, progress)) if model == "tiny" else model
    base = load_base_model(source, config.policy)
    engine, reason = make_engine(
        base.model,
        base.eos_token_ids,
        config.rollout.slots,
        max_length=_longest_sequence(config, base),
        kind=config.rollout.engine,
        source=find_model(source),
        lora_rank=config.policy.lora_rank,
    )
    log.info("rollout engine: %s", reason)
    policy = Policy(base, config.policy, seed)
    store = CheckpointStore(
        paths.checkpoints, Path(model).name, base.fingerprint, keep=config.node.keep_checkpoints
    )
    return LocalPolicy(base, policy, engine, Renderer(base.tokenizer, base.eos_token_ids), store)


def _longest_sequence(config: Config, base: "LoadedModel") -> int:
    """Prompt and completion as the settings bound them, within what the model was made for."""
    rollout, limit = config.rollout, base.max_positions
    if limit is not None and rollout.max_tokens >= limit:
        raise ConfigError(
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt:"
            f" {base.name} takes {limit} tokens in all",
            hint=f"try --set rollout.max_tokens={limit // 2}",
        )
    wanted = rollout.max_prompt_tokens + rollout.max_tokens
    return wanted if limit is None else min(wanted, limit)


def _longest_prompt(config: Config, base: "LoadedModel") -> int:
    """The longest prompt that leaves room for a whole completion, as the engine has it."""
    return _longest_sequence(config, base) - config.rollout.max_tokens


def choose_overlap(config: Config, local: LocalPolicy) -> Overlap:
    """Whether generation and training fit side by side into what is free now, the model being loaded."""
    import torch

    model = local.base.model
    gpu = model.device.type == "cuda"
    machine = inspect_machine()
    free = torch.cuda.mem_get_info(model.device)[0] if gpu else machine.memory_free_bytes
    decision = decide_overlap(
        config.rollout.overlap,
        max_lag=config.rollout.max_lag,
        gpu=gpu,
        cores=machine.cores,
        free_bytes=free,
        need_bytes=_overlap_bytes(config, local),
    )
    log.info("overlap of generation and training %s", decision.reason)
    return decision


def _overlap_bytes(config: Config, local: LocalPolicy) -> float | None:
    """What generation and training take at once, beyond what is loaded; None where nobody can tell."""
    card = local.base.card
    if card is None:
        return None
    plan = plan_memory(
        card,
        slots=config.rollout.slots,
        sequence_tokens=_longest_sequence(config, local.base),
        micro_batch_tokens=config.training.micro_batch_tokens,
        weight_bytes=local.base.model.dtype.itemsize,
    )
    return plan.activations + (0 if local.engine.capabilities.reserves_kv else plan.kv_cache)


def build_learner(
    config: Config,
    local: LocalPolicy,
    tasks: Mapping[str, Task],
    *,
    author: str,
    seed: int,
    overlap: Overlap,
) -> "PolicyLearner":
    """The learning half of the node that `author` names."""
    from swarmnode.node.policy_learner import PolicyLearner

    return PolicyLearner(
        config,
        local.policy,
        local.engine,
        local.renderer,
        tasks,
        local.store,
        author=author,
        seed=seed,
        overlap=overlap,
    )


def build_network(
    config: Config, paths: Paths, key: NodeKey, port: int, tasks: Mapping[str, Task], local: LocalPolicy
) -> NetworkParts:
    """Host, exchange and discovery, not yet started."""
    network = config.network
    host = P2pdHost(paths.identity, listen=(f"/ip4/{network.listen}/tcp/{port}",), announce=network.announce)
    exchange = Exchange(
        host,
        key,
        tasks=tasks,
        encode=local.renderer.encode_completion,
        prompt_ids=local.renderer.prompt_ids,
        settings=exchange_settings(config, _longest_prompt(config, local.base)),
        model_family=local.base.family,
        model_size=local.base.parameters,
    )
    book = PeerBook.load(paths.peers)
    namespace = f"/swarmnode/1/{config.swarm.name}"
    discovery = Discovery(
        host, book, network.seeds, namespace, mdns=network.mdns, mdns_interfaces=_interfaces(network)
    )
    return NetworkParts(host, exchange, discovery)


def exchange_settings(config: Config, longest_prompt: int) -> ExchangeSettings:
    """The exchange's settings out of the node's: a peer's group costs at most what two of our own do."""
    wanted = config.exchange.external_groups
    return ExchangeSettings(
        swarm=config.swarm.name,
        shards=config.exchange.shards,
        max_group_size=min(2 * config.rollout.group_size, MAX_GROUP_SIZE),
        max_prompt_tokens=longest_prompt,
        max_completion_tokens=config.rollout.max_tokens,
        max_age_versions=config.exchange.max_age,
        buffer_groups=config.exchange.buffer_groups,
        prefetch_groups=wanted,
        fetch_concurrency=max(4, min(wanted, 16)),
    )


def _interfaces(network: NetworkConfig) -> tuple[str, ...]:
    """Where multicast DNS looks: everywhere, or only where we listen."""
    return () if network.listen == "0.0.0.0" else (network.listen,)


def seed_of(config: Config, peer_id: str) -> int:
    """The seed that is set, else one of this node's own: strangers should not all ask the same questions."""
    if config.node.seed is not None:
        return config.node.seed
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") >> 1


def check_addresses(network: NetworkConfig) -> None:
    """Raises NetworkError for a seed or an announced address that is none, before any work is done."""
    for address in network.seeds:
        split_peer(address)
    for address in network.announce:
        parse_address(address)


def check_status_port(node: NodeConfig) -> None:
    """Raises PortInUse for a status port that is taken, before the model is loaded for nothing."""
    if node.http_port and not _is_free(node.http, node.http_port):
        raise PortInUse(
            f"the status page cannot listen on {node.http}:{node.http_port}",
            hint="choose another --set node.http_port=..., or 0 for any free one",
        )


def choose_port(network: NetworkConfig, paths: Paths) -> int:
    """The port to listen on: the one that is set, else last time's if it is free, else any.

    Raises PortInUse for a set port that is taken. A steady port keeps remembered addresses valid.
    """
    remembered = _remembered_port(paths)
    for port in (network.port, remembered):
        if port and _is_free(network.listen, port):
            return port
    if network.port:
        raise PortInUse(
            f"port {network.port} on {network.listen} is in use or not allowed",
            hint="choose another --port, or leave it out for any free one",
        )
    if remembered:
        log.info("port %d of last time is taken; listening on another one", remembered)
    return 0


def remember_port(paths: Paths, addresses: tuple[str, ...]) -> None:
    """Keep the TCP port that the host listens on for the next start."""
    ports = [address.split("/tcp/")[1].split("/")[0] for address in addresses if "/tcp/" in address]
    if ports:
        paths.state.mkdir(parents=True, exist_ok=True)
        _port_file(paths).write_text(ports[0])


def _remembered_port(paths: Paths) -> int | None:
    try:
        port = int(_port_file(paths).read_text())
    except (OSError, ValueError):
        return None
    return port if 0 < port < 65536 else None


def _port_file(paths: Paths) -> Path:
    return paths.state / "port"


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def _tiny(paths: Paths, progress: Progress) -> Path:
    from swarmnode.training.tiny import build_tiny

    return build_tiny(paths.models, progress=progress)
