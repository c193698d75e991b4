"""The page of a status that a test makes up, served on loopback."""

from collections.abc import Callable, Mapping
from pathlib import Path

from swarmnode.extensions.page.page_server import PageServer
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.node.showing.node_status import (
    Network,
    NodeStatus,
    Phase,
    Progress,
    Rewards,
    Saved,
    Sharing,
    Speed,
)
from swarmnode.settings.config import Config
from swarmnode.training.records import TrainReport

STATUS = NodeStatus(
    peer_id="12D3KooWexample",
    name="calm-blue-otter",
    swarm="commons",
    model="tiny",
    version="0.1.0",
    pid=7,
    started_at=1000.0,
    phase=Phase("generating", 1000.0, "32 groups of 8"),
    progress=Progress(round=12, rounds_limit=60, policy_version=11, tokens=4096, seconds=3.5),
    reward=Rewards(own=0.25, eval_first=0.2, eval_tasks={"rev": 0.1, "sort": None}),
    speed=Speed(tokens_per_s=900.0),
    network=Network("up", 1000.0, 1, "", 2, ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWexample",)),
    exchange=Sharing(published=3, accepted=2, dropped={"bad_signature": 4}, trained={"12D3KooWother": 2}),
    training=TrainReport(own_groups=5, external_groups=2, loss=-0.01),
    checkpoint=Saved(10, 1000.0),
)
NOWHERE = resolve_paths(Path("/nowhere"))


def page_source(
    status: Callable[[], NodeStatus],
    *,
    control: RunControl | None = None,
    node: Mapping[str, object] | None = None,
    paths: Paths = NOWHERE,
    rollouts: Path | None = None,
) -> NodeSource:
    """A node with this status. `node`: settings of that section."""
    config = Config.model_validate({"node": dict(node or {})})
    return NodeSource(status, control or RunControl(lambda: None), config, {}, paths, rollouts)


def shown_page(status: Callable[[], NodeStatus], **more: object) -> PageServer:
    """`with shown_page(lambda: STATUS) as page:` serves it."""
    return PageServer(page_source(status, **more))  # type: ignore[arg-type]
