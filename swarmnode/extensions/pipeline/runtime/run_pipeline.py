"""Runs a pipeline member as a process: model, measurements, parts, signals, and the last line of output.

cli join --pipeline NAME -> [run_pipeline] -> pipeline_node.py
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch

from swarmnode.cpu_kernels import use_kernels
from swarmnode.errors import CheckpointError, plain_error
from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStageSettings
from swarmnode.extensions.pipeline.plans.member_costs import MemberCosts
from swarmnode.extensions.pipeline.runtime.data_node import DataNode
from swarmnode.extensions.pipeline.runtime.data_roles import DataRole, RolloutInputs, RolloutRole, TextRole
from swarmnode.extensions.pipeline.runtime.member_parts import PipelineParts
from swarmnode.extensions.pipeline.runtime.pipeline_node import PipelineNode
from swarmnode.extensions.pipeline.runtime.pipeline_settings import (
    batch_tokens,
    check,
    check_closed,
    holds_data,
    membership_settings,
    plan_settings,
)
from swarmnode.extensions.pipeline.stages.measuring import measure_stage, memory_for_stage
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel, load_tokenizer, open_model
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints, single_machine_tensors
from swarmnode.extensions.pipeline.wire.codec import codec_for
from swarmnode.machine.hardware import torch_threads
from swarmnode.machine.memory_plan import size_text
from swarmnode.machine.ports import check_status_port, choose_port
from swarmnode.machine.storage import Paths
from swarmnode.model.base_model import find_device, find_dtype
from swarmnode.model.built_model import source_of
from swarmnode.network.admission import admission_to
from swarmnode.node.building.assemble import build_discovery, build_host, check_network, seed_of
from swarmnode.node.building.local_policy import renderer_of
from swarmnode.node.building.node_process import remove_running
from swarmnode.node.building.policies import Seat
from swarmnode.node.building.run import leave_note, take_identity
from swarmnode.node.building.task_processes import start_tasks, tasks_for_strangers
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.board import Watchers
from swarmnode.node.showing.ending import Ending, ending
from swarmnode.node.showing.monitors import MonitorFeed, make_monitors, run_info
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.node.showing.node_status import Summary, invitation
from swarmnode.node.showing.page import Page, open_page
from swarmnode.node.showing.screen import LOG_FILE, Screen
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings
from swarmnode.tasks.task import Task
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.checkpoints.run_folders import STAGES, name_of_base
from swarmnode.training.losses import loss_of

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.25
"""Share of the pipeline's memory that the keys and values of generation may take."""


def run_pipeline(settings: Settings, *, fresh: bool) -> Ending:
    """Runs a member until it is done or stopped (SIGINT, SIGTERM). The last line that it prints is the
    summary as JSON."""
    config, model, paths = settings.config, settings.model, settings.paths
    check(config)
    check_closed(config, private=admission_to(paths, config.swarm.name) is not None)
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(paths.logs / LOG_FILE))
        key = take_identity(stack, paths)
        tasks = start_tasks(stack, config.tasks, paths.home)
        seat = Seat(0, config, paths, key, seed_of(config, key.peer_id), tasks, settings.origins)
        check_network(config.network)
        check_status_port(config.node)
        whole = _open(config, model, paths, screen)
        memory = memory_for_stage(config.limits.memory_gb, find_device(config.policy.device))
        logger.info("%s is %s, peer id %s", "this node", key.name, key.peer_id)
        about = run_info(config, name=key.name, peer_id=key.peer_id, model=model, folder=paths.logs)
        feed = MonitorFeed(about, make_monitors(config.node.monitors))
        watcher = Watchers([feed, screen.start_watcher()])
        stack.callback(watcher.close)
        run = name_of_base(whole.name, whole.fingerprint)
        store = CheckpointStore(paths.checkpoints / run, keep=config.node.keep_checkpoints)
        parts = _parts(seat, whole, memory, store, fresh=fresh)
        role = _data_role(seat, whole, store, tasks_for_strangers(stack, tasks))
        STOP_SIGNALS.check()
        return ending([key.peer_id], [asyncio.run(_serve(PipelineNode(parts, watcher, role), seat))])


async def _serve(node: PipelineNode, seat: Seat) -> Summary:
    try:
        async with node:
            stop = partial(asyncio.get_running_loop().call_soon_threadsafe, node.request_stop)
            control = RunControl(stop, ("stop",))
            source = NodeSource(lambda: node.status, control, seat.config, seat.origins, seat.paths)
            with open_page(source) as page:
                node.show_page(page.address)
                _announce(node, page, seat)
                STOP_SIGNALS.hand_to(node.request_stop)
                return await node.run()
    except BaseExceptionGroup as group:
        raise plain_error(group) from group
    finally:
        remove_running(seat.paths.running)


def _announce(node: PipelineNode, page: Page, seat: Seat) -> None:
    """Leave a note for `swarmnode status`, and log how another machine can join."""
    status = node.status
    leave_note(status, seat, page)
    if page.address:
        logger.info("the page of this node: %s", page.address)
    if (command := invitation(status)) is not None:
        logger.info("another machine becomes a member with the same model and settings, and:")
        logger.info("  %s", command)


def _open(config: Config, model: str, paths: Paths, screen: Screen) -> WholeModel:
    torch.set_num_threads(torch_threads())
    use_kernels(config.policy.cpu_kernels).keep_in(paths.cache / "native")
    source = source_of(model, paths.models, screen.progress)
    return open_model(source, find_dtype(config.policy.dtype, find_device(config.policy.device)))


def _parts(
    seat: Seat, whole: WholeModel, memory: int, store: CheckpointStore, *, fresh: bool
) -> PipelineParts:
    """Make the parts of a member. `memory`: bytes for the stage and for generation."""
    config, paths, pipeline = seat.config, seat.paths, seat.config.pipeline
    device = find_device(config.policy.device)
    stage = StageSettings(
        trainable=pipeline.trainable,
        adapter=config.policy,
        dtype=find_dtype(config.policy.dtype, device),
        device=device,
    )
    cache = round(CACHE_SHARE * memory)
    logger.info("memory for the pipeline: %s", size_text(memory))
    tokens = batch_tokens(config, whole)
    has_data = holds_data(config)
    timings = measure_stage(whole, stage, micro_batch_tokens=tokens)

    def costs() -> MemberCosts:
        return MemberCosts(
            peer_id=seat.key.peer_id,
            free_bytes=memory - cache,
            memory_slots=pipeline.slots,
            holds_data=has_data,
            timings=timings,
            measured_at_s=time.time(),
        )

    checkpoints = StageCheckpoints(paths.checkpoints / f"{STAGES}{whole.fingerprint}", whole.fingerprint)
    if fresh:
        _put_aside(checkpoints, store)
    host = build_host(config, paths, choose_port(config.network, paths))
    return PipelineParts(
        config=config,
        key=seat.key,
        whole=whole,
        host=host,
        discovery=build_discovery(config, paths, host),
        plan=plan_settings(config, whole),
        membership=membership_settings(config),
        own_stage=OwnStageSettings(
            stage=stage,
            learning_rate=config.training.learning_rate,
            max_tokens=tokens,
            activations="recomputed" if config.training.gradient_checkpointing == "on" else "kept",
            free_bytes=memory - cache,
            cache_bytes=cache,
            checkpoint_every=config.node.checkpoint_every,
        ),
        member=MemberSettings(
            codec=codec_for(stage.dtype),
            max_norm=config.training.grad_clip,
        ),
        costs=costs,
        checkpoints=checkpoints,
        earlier=_earlier(checkpoints, store, whole),
    )


def _earlier(
    checkpoints: StageCheckpoints, store: CheckpointStore, whole: WholeModel
) -> tuple[HeldState, ...]:
    """Return the newest state of this member's own stage and, if it was a data node, that of the whole
    model."""
    found: list[HeldState] = []
    if (latest := store.latest()) is not None and latest.state.policy_version:
        try:
            tensors = single_machine_tensors(latest.folder)
        except CheckpointError as error:
            logger.warning("%s", error)
        else:
            if tensors.tensors:
                part = StagePart(0, whole.layers, has_ends=True)
                found.append(HeldState.of(part, tensors.iteration, tensors.tensors))
    return (*found, *islice(checkpoints.states(), 1))


def _put_aside(checkpoints: StageCheckpoints, store: CheckpointStore) -> None:
    if archived := store.archive():
        logger.info("starting over; earlier checkpoints are kept in %s", archived)
    if checkpoints.folder.exists():
        aside = checkpoints.folder.with_name(f"{checkpoints.folder.name}.{int(time.time())}")
        checkpoints.folder.rename(aside)
        logger.info("starting over; earlier stages are kept in %s", aside)


def _data_role(
    seat: Seat, whole: WholeModel, store: CheckpointStore, tasks_of_others: Mapping[str, Task]
) -> Callable[[DataNode], DataRole]:
    """Return a function that makes the data role on demand: most members never load a tokenizer."""
    if seat.config.pipeline.data and not seat.config.pipeline.text:
        loss_of(seat.config.training.loss)  # Refuses a loss that cannot be imported before we are a member.

    def make(data_node: DataNode) -> DataRole:
        tokenizer, ends = load_tokenizer(whole)
        if seat.config.pipeline.text:
            return TextRole(data_node, tokenizer, seat.seed)
        renderer = renderer_of(seat.config.policy, tokenizer, ends)
        return RolloutRole(data_node, RolloutInputs(seat.tasks, tasks_of_others, renderer, store, seat.seed))

    return make
