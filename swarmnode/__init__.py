"""swarmnode: a member of a decentralized reinforcement-learning swarm for language models.

As a command: `swarmnode join`. As a library, one node in a script:

    import swarmnode as sn

    node = sn.Node(task=examples, reward=reward, rounds=20)
    print(node.run().reward_last, node.policy.generate("last abcd="))

The names in `__all__`, with their parameters and documented attributes, change only with the second number of
the version; every other module may change with any commit. To follow a rollout from start to end, read the
folders in the order identity, network, tasks, rollout, exchange, model, training, node, cli.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmnode import errors
    from swarmnode.api import (
        Config,
        Example,
        GivenTask,
        Monitor,
        Node,
        NodeStatus,
        OfflineEvaluation,
        RewardSpec,
        RunInfo,
        Summary,
        Task,
        TrainedPolicy,
        evaluate,
        load_adapter,
        load_policy,
        run,
    )

__version__ = "0.1.0"

__all__ = [
    "Config", "Example", "GivenTask", "Monitor", "Node", "NodeStatus", "OfflineEvaluation", "RewardSpec",
    "RunInfo", "Summary", "Task", "TrainedPolicy", "errors", "evaluate", "load_adapter", "load_policy", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: `import swarmnode` itself loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "errors":
        return import_module("swarmnode.errors")
    from swarmnode.errors import ConfigError
    from swarmnode.machine.installing import NAMESAKE_ADVICE, find_namesake

    if (namesake := find_namesake()) is not None:
        raise ConfigError(namesake, hint=NAMESAKE_ADVICE)
    return getattr(import_module("swarmnode.api"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
