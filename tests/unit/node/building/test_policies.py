"""Several policies in one process: what each has of its own, and what becomes of the others if one fails."""

from pathlib import Path

import pytest

from swarmnode.errors import ConfigError
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.policies import Seat, check_policies, config_of, local_address
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config


def settings(*assignments: str) -> Config:
    return load_config(environ={}, assignments=assignments).config


def seats(config: Config) -> list[Seat]:
    paths = resolve_paths(Path("/nowhere"))
    return [
        Seat(k, config_of(config, k), paths.policy(k), NodeKey(bytes([k] * 32)), seed=k, tasks={})
        for k in range(config.node.policies)
    ]


def test_one_policy_has_the_settings_as_they_are() -> None:
    config = settings("network.port=4000", "node.http_port=8080", "node.seed=5")
    assert config_of(config, 0) == config


def test_each_policy_has_its_own_seed_tasks_and_ports() -> None:
    config = settings(
        "node.policies=3", "node.seed=5", "tasks.mixes=['rev, sort', 'gcd']", "network.port=4000",
        "network.announce=['/ip4/1.2.3.4/tcp/4000']", "node.http_port=8080",
    )  # fmt: skip
    each = [config_of(config, number) for number in range(3)]
    assert [one.node.seed for one in each] == [5, 6, 7]
    assert [one.tasks.names for one in each] == [("rev", "sort"), ("gcd",), ("rev", "sort")]
    assert [one.network.port for one in each] == [4000, 4001, 4002]
    assert [one.node.http_port for one in each] == [8080, 8081, 8082]
    assert [len(one.network.announce) for one in each] == [1, 0, 0], "a forwarded port leads to one policy"


def test_without_seed_and_mixes_policies_differ_by_their_identities_alone() -> None:
    config = settings("node.policies=2")
    assert config_of(config, 1).node.seed is None
    assert config_of(config, 1).tasks.names == config.tasks.names


def test_there_must_be_a_port_for_each() -> None:
    config = settings("node.policies=2", "network.port=65535")
    with pytest.raises(ConfigError, match="65536"):
        config_of(config, 1)
    near = settings("node.policies=3", "network.port=4000", "node.http_port=4002")
    with pytest.raises(ConfigError, match="are too close"):
        check_policies(near)
    check_policies(near.model_copy(update={"node": near.node.model_copy(update={"policies": 2})}))


def test_after_the_largest_seed_comes_the_smallest() -> None:
    config = settings("node.policies=2", f"node.seed={2**31 - 1}")
    assert config_of(config, 1).node.seed == 0


def test_every_mix_is_trained_on_by_some_policy() -> None:
    check_policies(settings("node.policies=3", "tasks.mixes=['rev', 'gcd']"))
    with pytest.raises(ConfigError, match="2 entries for 1 policy") as caught:
        check_policies(settings("tasks.mixes=['rev', 'gcd']"))
    assert "--policies 2" in caught.value.hint


def test_each_policy_dials_those_before_it_after_the_seeds_that_are_set() -> None:
    friend = "/ip4/10.0.0.9/tcp/7/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    config = settings("node.policies=3", f"network.seeds={friend}")
    first, second, _ = seats(config)
    address = local_address(first, (f"/ip4/10.0.0.5/tcp/4100/p2p/{first.key.peer_id}",))
    assert address is not None and address == f"/ip4/127.0.0.1/tcp/4100/p2p/{first.key.peer_id}"
    assert first.with_seeds([]).config.network.seeds == (friend,)
    assert second.with_seeds([address]).config.network.seeds == (friend, address)


def test_behind_a_router_neighbours_use_the_port_itself() -> None:
    (first,) = seats(settings("network.port=4000", "network.announce=/ip4/1.2.3.4/tcp/99"))
    assert local_address(first, ("/ip4/1.2.3.4/tcp/99/p2p/x",)) == (
        f"/ip4/127.0.0.1/tcp/4000/p2p/{first.key.peer_id}"
    )
    (nowhere,) = seats(settings())
    assert local_address(nowhere, ()) is None


def test_homes_lie_below_the_first_ones_and_share_settings_and_cache(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    second = paths.policy(1)
    assert paths.policy(0) == paths
    assert second.identity == tmp_path / "data" / "policies" / "1" / "identity" / "node.key"
    assert second.running == tmp_path / "state" / "policies" / "1" / "running.json"
    assert (second.user_config, second.models) == (paths.user_config, paths.models)
    assert paths.policies() == [paths]
    paths.policy(10).state.mkdir(parents=True)
    paths.policy(2).data.mkdir(parents=True)
    assert paths.policies() == [paths, paths.policy(2), paths.policy(10)]
