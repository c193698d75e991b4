"""One run: the nodes of a swarm, round by round, in one process.

Run -> models, settings -> SwarmNode * N -> [run_swarm] -> Outcome

All nodes that have a round in a tick do it together (`round_together`).
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch
from sapo_models import models_of
from sapo_node import ROUND_S, Clock, SwarmNode, node_key, round_together, settled
from sapo_plan import Outcome, Rule, Run, Swarm
from sapo_processes import run_processes
from sapo_rules import RULES
from sapo_swarms import SWARMS
from sapo_worlds import MAX_TOKENS, solved, tasks_of

from swarmnode.machine.storage import builtin_folder
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config, presets
from swarmnode.testing.attackers import ATTACKS, Attacker, injected_share

EVAL_EXAMPLES = 64

WATCHES = ("adaptive", "copies")
"""Attacks that look at what the others publish."""

PRESET = presets(builtin_folder("configs"))["tiny"]


def run_swarm(run: Run) -> Outcome:
    """The whole run, on one core."""
    torch.set_num_threads(1)
    swarm, rule = SWARMS[run.swarm], RULES[run.rule]
    if swarm.processes:
        return run_processes(run, swarm, rule, config_of(run), settings_of(run))
    return asyncio.run(_run(run, swarm, rule))


def config_of(run: Run) -> Config:
    """The preset of the tiny policy, with what swarm, rule and run say."""
    return load_config(preset=PRESET, environ={}, flags=settings_of(run)).config


def settings_of(run: Run) -> dict[str, Any]:
    """Those by name, without the preset's."""
    swarm, rule = SWARMS[run.swarm], RULES[run.rule]
    flags: dict[str, Any] = {
        "rollout.max_tokens": MAX_TOKENS[swarm.world],
        "tasks.eval_examples": EVAL_EXAMPLES,
        **swarm.settings,
        **rule.settings,
    }
    if rule.halves:
        half = load_config(preset=PRESET, environ={}, flags=flags).config.rollout.groups // 2
        flags |= {"exchange.local_groups": half, "exchange.external_groups": half}
    if run.learning_rate is not None:
        flags["training.learning_rate"] = run.learning_rate
    return flags


async def _run(run: Run, swarm: Swarm, rule: Rule) -> Outcome:
    started = time.process_time()
    config, models, tasks = config_of(run), models_of(swarm), tasks_of(swarm.world)
    clock, network = Clock(), MemoryNetwork(seed=run.seed) if rule.shares else None
    honest = swarm.nodes - swarm.attackers
    async with AsyncExitStack() as stack:
        nodes = [
            SwarmNode(
                config,
                models[number],
                tasks,
                name=f"{run.seed}/{number}",
                seed=1000 * run.seed + number,
                network=network,
                clock=clock,
                drops_own_failures=rule.drops_own_failures,
            )
            for number in range(honest)
        ]
        for number, node in enumerate(nodes):
            if swarm.joins_at(number) == 0:
                await _enter(stack, node, nodes[0])
        attackers = await _attackers(stack, run, swarm, nodes, network, clock) if network else []
        for tick in range(run.rounds):
            clock.now += ROUND_S
            for number, node in enumerate(nodes):
                if 0 < swarm.joins_at(number) == tick:
                    await _enter(stack, node, nodes[0])
            acting = [node for number, node in enumerate(nodes) if _acts(swarm, number, tick)]
            if rule.equal_answers:
                acting = [node for node in acting if not _has_spent(node, run, swarm)]
            for attacker in attackers:
                if swarm.attack in WATCHES:
                    await attacker.watch()
                await attacker.attack(tick + 1)
            await _round(acting, swarm)
        for node in nodes:
            node.evaluate()
    return _outcome(nodes, swarm, config, time.process_time() - started)


async def _enter(stack: AsyncExitStack, node: SwarmNode, first: SwarmNode) -> None:
    await stack.enter_async_context(node)
    if node.host is not None and first.host is not None and node is not first:
        await node.host.connect((await first.host.addresses())[0])
        await settled()


async def _attackers(
    stack: AsyncExitStack,
    run: Run,
    swarm: Swarm,
    nodes: Sequence[SwarmNode],
    network: MemoryNetwork,
    clock: Clock,
) -> list[Attacker]:
    rollout = nodes[0].config.rollout
    attackers = [
        Attacker(
            ATTACKS[swarm.attack],
            tasks_of(swarm.world),
            solved,
            key=node_key(f"{run.seed}/{number}"),
            seed=1000 * run.seed + number,
            groups=rollout.groups,
            group_size=rollout.group_size,
            network=network,
            clock=clock,
        )
        for number in range(len(nodes), swarm.nodes)
    ]
    for attacker in attackers:
        await stack.enter_async_context(attacker)
        assert nodes[0].host is not None
        await attacker.host.connect((await nodes[0].host.addresses())[0])
    await settled()
    return attackers


async def _round(nodes: Sequence[SwarmNode], swarm: Swarm) -> None:
    for node, own in zip(nodes, await round_together(nodes), strict=True):
        if swarm.world != "builtin":
            node.record.injected.append(injected_share(own))


def _acts(swarm: Swarm, number: int, tick: int) -> bool:
    return tick >= swarm.joins_at(number) and tick % swarm.every_of(number) == 0


def _has_spent(node: SwarmNode, run: Run, swarm: Swarm) -> bool:
    """Whether it has sampled what a node that asks once samples in so many rounds."""
    return sum(node.record.answers) >= run.rounds * _answers_a_round(node.config)


def _answers_a_round(config: Config) -> int:
    return config.rollout.groups * config.rollout.group_size


def _outcome(nodes: Sequence[SwarmNode], swarm: Swarm, config: Config, cpu_s: float) -> Outcome:
    records = [node.record for node in nodes]
    return Outcome(
        rewards=[record.rewards for record in records],
        answers=[record.answers for record in records],
        joined=[swarm.joins_at(number) for number in range(len(nodes))],
        held_out=[record.held_out[node.rounds] for node, record in zip(nodes, records, strict=True)],
        injected=[record.injected for record in records],
        generated_tokens=sum(record.generated_tokens for record in records),
        trained_tokens=sum(record.trained_tokens for record in records),
        received_tokens=sum(record.received_tokens for record in records),
        sent_bytes=sum(record.sent_bytes for record in records),
        cpu_s=cpu_s,
        answers_a_round=_answers_a_round(config),
    )
