"""Collects learned state from the members that hold it: that of one stage, or of all stages together.

members' states (state_service.py) -> [stage_state] -> own_stage.py: a stage goes on where the pipeline is
                            -> [majority_state] -> PipelineMember: a replica that came to other weights
                            -> [whole_state] -> data_node.py -> PipelineLearner: a checkpoint of the whole

Members offer a state right after the step that produced it, but answer a member only after they have heard of
the plan that includes it. So the newest state is asked for several times before an older one is accepted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress

from torch import Tensor

from swarmnode.errors import CheckpointError, PipelineError
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.states.holdings import Assembled, of_part
from swarmnode.extensions.pipeline.states.state_service import StateService

logger = logging.getLogger(__name__)

NEWEST_TRIES = 5
"""Tries for the newest state before an older one is accepted."""
STAGE_TRIES = 20
"""Tries for any state at all before a stage starts from scratch and its learning is lost."""
PAUSE_S = 0.5
"""Pause between two tries."""

STATE_COPIES = 4
"""A state holds the weights and Adam's two moments. The fourth is for layers of different sizes."""
STATE_SPARE_BYTES = 2**20


async def whole_state(
    states: StateService,
    members: Collection[str],
    part: StagePart,
    *,
    layers: int,
    iteration: int,
    wanted: Mapping[str, Tensor],
) -> Assembled:
    """Return the learned state of all stages of a model with this number of layers, under PEFT's names: of
    this iteration if all members have offered it, or else of the newest one that they all have. `part` and
    `wanted`: our own layers and their parameters, which determine the size limit of others' states. Raises
    PipelineError."""
    everything = StagePart(0, layers, has_ends=True)
    most_bytes = _most_bytes(part, layers, wanted)

    async def look(newest: bool) -> Assembled:
        least = iteration if newest else 1
        return await states.assemble(
            members, everything, at_least=least, at_most=iteration, most_bytes=most_bytes
        )

    try:
        return await _found(look, tries=NEWEST_TRIES + 1, newest=NEWEST_TRIES)
    except CheckpointError as error:
        raise PipelineError(error.message, hint=error.hint) from error


async def stage_state(
    states: StateService,
    members: Collection[str],
    part: StagePart,
    *,
    iteration: int,
    layers: int,
    wanted: Mapping[str, Tensor],
    with_ends: bool,
) -> Assembled:
    """Return the learned state of these layers: of this iteration, or else the newest of each layer.

    A layer that no member holds stays as it is in `wanted`, and the log reports it as lost. `layers`: of the
    whole model. `wanted`: the parameters that the state is for. `with_ends`: embedding and head are trained
    too. Raises CheckpointError if no member holds any of the layers.
    """
    bound = None if with_ends else _most_bytes(part, layers, wanted)

    async def assemble(these: StagePart, *, newest: bool) -> Assembled:
        return await states.assemble(
            members,
            these,
            needs_ends=with_ends and these.has_ends,
            at_least=iteration if newest else 1,
            at_most=iteration,
            most_bytes=bound,
            wanted=of_part(wanted, these),
            mixed=not newest,
        )

    tries = STAGE_TRIES if iteration else 1
    with suppress(CheckpointError):
        return await _found(
            lambda newest: assemble(part, newest=newest), tries=tries, newest=min(NEWEST_TRIES, tries - 1)
        )
    found: list[Assembled] = []
    lost: list[int] = []
    for layer in range(part.first_layer, part.end_layer):
        one = StagePart(layer, layer + 1, has_ends=part.has_ends and layer == part.first_layer)
        try:
            found.append(await assemble(one, newest=False))
        except CheckpointError:
            lost.append(layer)
    if not found:
        raise CheckpointError(
            f"nobody has layers {part.first_layer} to {part.end_layer - 1}",
            hint="start these layers from the model's folder, or from a checkpoint",
        )
    logger.error("what was learnt in layers %s is lost, they continue from what is available", lost)
    tensors = dict(wanted)
    for each in found:
        tensors |= each.tensors
    iteration = min(each.iteration for each in found)
    return Assembled(tensors, iteration, any(each.is_disputed for each in found))


async def majority_state(
    states: StateService, replicas: Collection[str], part: StagePart, *, iteration: int, with_ends: bool
) -> Mapping[str, Tensor]:
    """Return the state of exactly this iteration, from replicas whose weights are the majority's. Raises
    CheckpointError."""

    async def look(newest: bool) -> Assembled:
        return await states.assemble(
            replicas,
            part,
            needs_ends=with_ends and part.has_ends,
            at_least=iteration,
            at_most=iteration,
        )

    return (await _found(look, tries=STAGE_TRIES, newest=STAGE_TRIES)).tensors


async def _found(look: Callable[[bool], Awaitable[Assembled]], *, tries: int, newest: int) -> Assembled:
    """Call `look` until it succeeds: the first `newest` times for the newest state, then for any. Raises its
    last CheckpointError."""
    for attempt in range(tries - 1):
        with suppress(CheckpointError):
            return await look(attempt < newest)
        await asyncio.sleep(PAUSE_S)
    return await look(tries <= newest)


def _most_bytes(part: StagePart, layers: int, wanted: Mapping[str, Tensor]) -> int:
    """Return a size limit for the state of one stage, however the layers are divided. (With trained ends
    there is no limit, because not every stage has them.)"""
    own = sum(tensor.nbytes for tensor in wanted.values())
    return STATE_COPIES * own * layers // max(part.end_layer - part.first_layer, 1) + STATE_SPARE_BYTES
