"""A transport of a user's own, named in the settings, carries the rollouts of two whole nodes."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import swarmnode as sn
from swarmnode.errors import ConfigError
from swarmnode.extensions.doctor.diagnosis import transport_finding
from swarmnode.identity.key_file import load_or_create
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.network.host import Message
from swarmnode.node.building.assemble import build_discovery, build_exchange, build_host
from swarmnode.node.node import NodeLoop
from swarmnode.node.showing.board import StatusBoard, Watchers
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.testing import FakeLearner, FakeTask
from tests.toy_host import OWN_TRANSPORT, LosesEveryTenth
from tests.unit.rollout.test_renderer import byte_tokenizer


def settings(*more: str) -> Config:
    said = ["network.listen=127.0.0.1", "network.seeds=[]", f"network.transport={OWN_TRANSPORT}", *more]
    return load_config(environ={}, assignments=said).config


def member(config: Config, paths: Paths) -> tuple[NodeLoop, NetworkParts, FakeLearner]:
    key = load_or_create(paths.identity)
    host = build_host(config, paths, port=0)
    renderer = Renderer(byte_tokenizer(None), (256,))
    exchange = build_exchange(
        config, host, key, {"sum": FakeTask()}, renderer, family="fake", parameters=1, longest_prompt=64
    )
    network = NetworkParts(host, exchange, build_discovery(config, paths, host))
    learner = FakeLearner(key.peer_id, seed=key.seed[0])
    board = StatusBoard(config, peer_id=key.peer_id, name="n", model="fake")
    node = NodeLoop(config, learner, board, Watchers([]), seed=0, network=network)
    return node, network, learner


async def test_two_nodes_learn_from_each_other_over_a_transport_of_ones_own(tmp_path: Path) -> None:
    config = settings("node.rounds=8", "network.wait_for_peers=1")
    members = [member(config, resolve_paths(tmp_path / name)) for name in ("one", "other")]
    async with AsyncExitStack() as stack:
        for node, _, _ in members:
            await stack.enter_async_context(node)
        (first, there, _), (second, here, _) = members
        await here.host.connect((await there.host.addresses())[0])
        await asyncio.gather(first.run(), second.run())
    for _, network, learner in members:
        assert isinstance(network.host, LosesEveryTenth) and network.host.given >= 10
        assert sum(len(external) for _, external in learner.trained) > 0


async def test_it_loses_every_tenth_message(tmp_path: Path) -> None:
    config = settings()
    async with (
        build_host(config, resolve_paths(tmp_path / "one"), 0) as one,
        build_host(config, resolve_paths(tmp_path / "other"), 0) as other,
    ):
        await one.connect((await other.addresses())[0])
        heard = await other.subscribe("numbers")
        for number in range(21):
            await one.publish("numbers", bytes([number]))
        found: list[Message] = [await anext(heard) for _ in range(19)]
    assert [message.data[0] for message in found] == [n for n in range(21) if (n + 1) % 10]


def without_options(identity_path: Path) -> None: ...


def no_host(identity_path: Path, **options: object) -> object:
    return object()


def test_a_transport_that_makes_no_host_says_what_that_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no_host' made a object, which lacks: peer_id, .*, open_stream"):
        build_host(settings(f"network.transport={__name__}:no_host"), resolve_paths(tmp_path), 0)


def test_a_node_with_a_wrong_transport_ends_before_it_looks_at_its_model(tmp_path: Path) -> None:
    said = {"network.transport": f"{__name__}:without_options"}
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'listen'.*Transport in"):
        sn.run([("a", "b")], "exact_match", model=tmp_path / "no model", home=tmp_path, settings=said)


def test_doctor_looks_at_a_transport_of_ones_own() -> None:
    found = transport_finding(OWN_TRANSPORT)
    assert (found.verdict, found.text) == ("ok", f"{OWN_TRANSPORT}, a function")
    wrong = transport_finding(f"{__name__}:without_options")
    assert (
        wrong.verdict == "problem" and "'listen'" in wrong.text and "(identity_path, listen=" in wrong.advice
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quic", "no such transport; available: p2pd. Use your own as mymodule:name"),
        ("no_such_module:host", "cannot be imported: No module named 'no_such_module'"),
    ],
)
def test_a_transport_that_cannot_be_had_says_why(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build_host(settings(f"network.transport={name}"), resolve_paths(tmp_path), 0)
