"""Checks a member's settings, and derives the settings of planning and membership from them.

Config -> [check, plan_settings, membership_settings] -> run_pipeline.py
"""

import logging
from ipaddress import IPv4Address
from pathlib import Path

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.plans.model_costs import StageTraining, model_costs
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.extensions.pipeline.wire.hop_messages import MAX_BACK
from swarmnode.extensions.pipeline.wire.services import MAX_TENSOR_BYTES
from swarmnode.model.base_model import find_device, find_dtype
from swarmnode.node.building.machine_memory import longest_sequence
from swarmnode.settings.config import Config

logger = logging.getLogger(__name__)

TEXT_WAVES = 4
MOST_WAVES = 256
MICRO_BATCH_TOKENS = 1024
"""Tokens of a micro-batch by default."""
BYTES_IN_FLIGHT = 2
"""Bytes of a number on the wire (codec.py)."""


def check(config: Config) -> None:
    """Raises ConfigError for settings that are not available in a pipeline."""
    training, rollout, pipeline = config.training, config.rollout, config.pipeline
    unusable = {
        "node.policies": config.node.policies > 1,
        "tasks.mixes": bool(config.tasks.mixes),
        "policy.quantization": config.policy.quantization != "none",
        "rollout.engine": rollout.engine not in ("auto", "embedded"),
        "node.learner": config.node.learner != "local",
        "rollout.overlap": rollout.overlap == "on",
        "training.kl_coef": training.kl_coef > 0,
        "training.schedule": training.schedule != "constant",
        "training.warmup_rounds": training.warmup_rounds > 0,
        "training.inner_epochs": training.inner_epochs > 1,
    }
    for key, used in unusable.items():
        if used:
            raise ConfigError(
                f"{key} is not available in a pipeline", hint=f"leave {key} as it is by default"
            )
    most = pipeline.slots * waves_of(config)
    if most > MAX_BACK:
        raise ConfigError(
            f"a round is {most} micro-batches of one data node, more than {MAX_BACK}",
            hint="lower pipeline.slots",
        )


ANYONE = "anyone"
"""Value of pipeline.members that opens the pipeline to the whole swarm."""


def check_closed(config: Config, *, private: bool) -> None:
    """Raises ConfigError if any peer of a public swarm could join the pipeline: members trust each other.
    `private`: only invited nodes are in the swarm."""
    local = IPv4Address(config.network.listen).is_loopback
    if private or local or config.pipeline.members:
        return
    raise ConfigError(
        f"swarm {config.swarm.name} is public, and a pipeline trusts its members",
        hint="invite them: swarmnode swarm create NAME --private; or name them in pipeline.members, or let"
        f" everybody in with --set pipeline.members={ANYONE}",
    )


def plan_settings(config: Config, whole: WholeModel) -> PlanSettings:
    """Return the settings that all members must agree on before they can plan together."""
    pipeline, tokens = config.pipeline, batch_tokens(config, whole)
    token_bytes = whole.card.hidden * BYTES_IN_FLIGHT
    if tokens * token_bytes > MAX_TENSOR_BYTES:
        raise ConfigError(
            f"a micro-batch of {tokens:,} tokens is {tokens * token_bytes:,} bytes from stage to stage, more"
            f" than {MAX_TENSOR_BYTES:,}",
            hint=f"lower training.micro_batch_tokens to {MAX_TENSOR_BYTES // token_bytes} or less",
        )
    dtype = find_dtype(config.policy.dtype, find_device(config.policy.device))
    training = StageTraining(
        pipeline.trainable,
        config.policy.lora_rank,
        dtype.itemsize,
        tokens,
        recomputed=config.training.gradient_checkpointing == "on",
    )
    return PlanSettings(
        model=model_costs(whole.card, training),
        micro_batch_tokens=tokens,
        token_bytes=token_bytes,
        skip=pipeline.skip,
        slots=pipeline.slots,
        waves=waves_of(config),
        stages=pipeline.stages,
        others=(
            ("trainable", pipeline.trainable),
            ("lora_alpha", str(config.policy.lora_alpha)),
            ("lora_targets", ",".join(config.policy.lora_targets)),
            ("learning_rate", str(config.training.learning_rate)),
            ("grad_clip", str(config.training.grad_clip)),
            ("loss", config.training.loss),
            ("dtype", str(dtype)),
            ("text", "yes" if pipeline.text else "no"),
        ),
    )


def holds_data(config: Config) -> bool:
    """Return True if we can be in stage 0: the settings allow it, and we have the training data."""
    pipeline = config.pipeline
    if not pipeline.data or not pipeline.text:
        return pipeline.data
    found = Path(pipeline.text).expanduser().exists()
    if not found:
        logger.warning(
            "pipeline.text is %s, which is not here: this member holds stages other than that of the data",
            pipeline.text,
        )
    return found


def membership_settings(config: Config) -> MembershipSettings:
    """Return the settings of membership: the peers that may take part, and how many the first plan waits
    for."""
    pipeline = config.pipeline
    return MembershipSettings(
        swarm=config.swarm.name,
        name=pipeline.name,
        allowed=None if not pipeline.members or ANYONE in pipeline.members else frozenset(pipeline.members),
        at_least=pipeline.wait_for_members,
    )


def batch_tokens(config: Config, whole: WholeModel) -> int:
    """Return the tokens of one micro-batch. It has room for at least the longest sequence, which is sent
    alone."""
    tokens = wanted_tokens(config)
    if config.pipeline.text:
        return tokens
    return max(tokens, longest_sequence(config, whole.name, whole.max_positions))


def wanted_tokens(config: Config) -> int:
    """Return the tokens of one micro-batch according to the settings."""
    return config.training.micro_batch_tokens or MICRO_BATCH_TOKENS


def waves_of(config: Config) -> int:
    """Return the waves of an iteration: enough for a round of full-length answers to the longest prompts.

    >>> waves_of(Config())
    22
    """
    pipeline, rollout = config.pipeline, config.rollout
    if pipeline.text:
        return TEXT_WAVES
    groups = max(rollout.groups, config.exchange.local_groups + config.exchange.external_groups)
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    in_one = max(1, wanted_tokens(config) // longest)
    return max(1, min(MOST_WAVES, -(-groups * rollout.group_size // (pipeline.slots * in_one))))
