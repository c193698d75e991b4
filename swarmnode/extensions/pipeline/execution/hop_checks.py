"""Checks of a tensor message against the plan, independent of the state of its receiver.

tensor_transport.py -> active_assignment.py -> [check_hop] -> relay.py, iteration_driver.py

It looks only at the message, before any byte of the tensor is read. So the check is cheap, and numbers sent
by a stranger are within bounds before anything is allocated for them.
"""

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.wire.hop_messages import ForwardHop, Hop
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.training.packing import MOST_KEYS_PER_TOKEN


def check_hop(message: Hop, plan: Plan, model: StageModel, *, max_tokens: int) -> None:
    """Raises Rejected unless a message fits the plan: unknown_work, wrong_route, wrong_shape, too_large.

    Its path may differ from the plan's if members were lost: it must begin at the agent's data node and pass
    every other stage at most once.
    """
    waves = plan.instance.waves
    if message.agent >= len(plan.paths) or message.wave >= waves:
        raise Rejected(Refusal.UNKNOWN_WORK, f"agent {message.agent}, wave {message.wave}")
    if message.micro_batch != message.agent * waves + message.wave:
        raise Rejected(Refusal.UNKNOWN_WORK, f"micro-batch {message.micro_batch} of agent {message.agent}")
    stage_of = plan.instance.stage_of
    stages = [stage_of[node] for node in message.path]
    if message.path[0] != plan.paths[message.agent][0]:
        raise Rejected(Refusal.WRONG_ROUTE, f"agent {message.agent} does not start at node {message.path[0]}")
    if len(set(stages)) < len(stages) or -1 in stages or 0 in stages[1:]:
        raise Rejected(Refusal.WRONG_ROUTE, f"a path through stages {stages}")
    shape = message.tensor.shape
    if len(shape) != 3 or shape[2] != model.hidden_size:
        raise Rejected(Refusal.WRONG_SHAPE, f"{list(shape)} where the width is {model.hidden_size}")
    tokens = shape[0] * shape[1]
    if tokens > max_tokens:
        raise Rejected(Refusal.TOO_LARGE, f"{tokens} tokens, at most {max_tokens}")
    if isinstance(message, ForwardHop):
        _check_packing(message, tokens, max_tokens=max_tokens, packs=model.packs)


def _check_packing(message: ForwardHop, tokens: int, *, max_tokens: int, packs: bool) -> None:
    if message.tokens > tokens:
        raise Rejected(Refusal.WRONG_SHAPE, f"{message.tokens} of {tokens} tokens are learned from")
    if not message.lengths:
        return
    if not packs:
        raise Rejected(Refusal.WRONG_SHAPE, "this model takes no packed rows")
    if message.tensor.shape[0] != 1 or sum(message.lengths) != tokens:
        raise Rejected(
            Refusal.WRONG_SHAPE, f"{sum(message.lengths)} packed tokens in {list(message.tensor.shape)}"
        )
    # The keys of a shared prompt are laid out again for every run that continues it. The memory plan covers
    # as many keys as an honest data node would pack.
    keys = tokens + sum(message.lengths[prompt] for prompt in message.prompts if prompt is not None)
    if keys > MOST_KEYS_PER_TOKEN * max_tokens:
        raise Rejected(Refusal.TOO_LARGE, f"{keys} keys, at most {MOST_KEYS_PER_TOKEN * max_tokens}")
