"""The numbers of a status for Prometheus.

node_status.py: measurements -> [metrics_of] -> GET /metrics
"""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import get_args, get_origin, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

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

COUNTERS = frozenset(
    f"{section}.{name}"
    for section, names in {
        "exchange": "published headers fetched accepted dropped unpublished served pulled through_holders"
        " bytes_in bytes_out",
        "generation": "resumed reprefilled_tokens kept_tokens unjudged_groups score_wait_s"
        " stale_groups_dropped swaps swap_s",
        "help": "asked heard answered tried dropped",
        "library": "pages_served borrowed answers rounds",
        "network": "restarts memory_restarts skipped",
        "pipeline": "plans repaired given_up stragglers lost",
        "receipts": "sent dropped",
    }.items()
    for name in names.split()
)
"""Numbers that start at zero and only grow while the process lives. What is counted over all starts is no
counter to Prometheus: a start from an older checkpoint would look like growth from zero."""


def metrics_of(status: NodeStatus) -> bytes:
    """Returns the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))  # pyright: ignore[reportArgumentType]
    return generate_latest(registry)


def name_of(dotted: str) -> str:
    """Returns the name of a measurement in Prometheus.

    >>> name_of("reward.own"), name_of("exchange.served")
    ('swarmnode_reward_own', 'swarmnode_exchange_served_total')
    """
    return f"swarmnode_{dotted.replace('.', '_')}{'_total' if dotted in COUNTERS else ''}"


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
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for dotted, value in measurements(status).items():
            name, label, label_value = _split(dotted)
            if name not in families:
                family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                families[name] = family(name_of(name), _help().get(name, ""), labels=[label] if label else [])
            families[name].add_metric([label_value] if label else [], value)
        yield from families.values()


def _split(dotted: str) -> tuple[str, str, str]:
    for prefix, label in LABELLED.items():
        if dotted.startswith(f"{prefix}."):
            return prefix, label, dotted.removeprefix(f"{prefix}.")
    return dotted, "", ""


@cache
def _help() -> dict[str, str]:
    return {name.removesuffix(".NAME"): told for name, _, told in fields_of()}


def fields_of(struct: type = NodeStatus, prefix: str = "") -> Iterator[tuple[str, bool, str]]:
    """Yields (dotted name, whether it is a number or several, sentence) of every field of a record, those of
    records in it, too."""
    told = sentences(struct)
    for name, kind in get_type_hints(struct).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from fields_of(kind, f"{prefix}{name}.")
            continue
        parts = get_args(kind)
        many = get_origin(kind) is dict
        is_number = bool({int, float} & {kind, *parts, *(part for one in parts for part in get_args(one))})
        yield f"{prefix}{name}{'.NAME' if many else ''}", is_number, told.get(name, "")


def sentences(of: type) -> dict[str, str]:
    """Returns the sentence under each field of a record or an enum; fields without one are absent."""
    tree = _source_of(of.__module__)
    (made,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == of.__name__)
    found: dict[str, str] = {}
    for field, below in zip(made.body, made.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(below, ast.Expr):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            assert isinstance(target, ast.Name) and isinstance(below.value, ast.Constant)
            found[target.id] = " ".join(str(below.value.value).split())
    return found


@cache
def _source_of(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))
