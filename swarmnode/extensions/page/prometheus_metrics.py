"""The numbers of a status for Prometheus.

node_status.py: measurements -> [metrics_of] -> GET /metrics
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from swarmnode.node.showing.node_status import NodeStatus, measurements

LABELLED = {
    "exchange.dropped": "reason",
    "exchange.unpublished": "reason",
    "exchange.trained": "peer",
    "reward.eval_tasks": "task",
    "reward.own_tasks": "task",
    "reward.external_tasks": "task",
    "reward.without_gradient": "reason",
    "reward.parts": "reward",
    "reward.parts_std": "reward",
    "network.skipped": "cause",
    "training.pass_rates": "task",
}
"""Maps in the status whose keys are labels, not metric names."""


def metrics_of(status: NodeStatus) -> bytes:
    """Returns the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))  # pyright: ignore[reportArgumentType]
    return generate_latest(registry)


class _Collector:
    def __init__(self, status: NodeStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status
        labels = {
            "peer_id": status.peer_id,
            "name": status.name,
            "swarm": status.swarm,
            "model": status.model,
        }
        yield InfoMetricFamily("swarmnode", "Who this node is", value=labels)
        families: dict[str, GaugeMetricFamily] = {}
        for dotted, value in measurements(status).items():
            name, label, label_value = _split(dotted)
            if name not in families:
                names = [label] if label else []
                families[name] = GaugeMetricFamily(f"swarmnode_{name.replace('.', '_')}", name, labels=names)
            families[name].add_metric([label_value] if label else [], value)
        yield from families.values()


def _split(dotted: str) -> tuple[str, str, str]:
    for prefix, label in LABELLED.items():
        if dotted.startswith(f"{prefix}."):
            return prefix, label, dotted.removeprefix(f"{prefix}.")
    return dotted, "", ""
