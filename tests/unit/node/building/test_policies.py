"""Several policies in one process: what each has of its own, and what becomes of the others if one fails."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import CheckpointError, ConfigError, EngineError, PortInUse, StorageError
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.policies import (
    Seat,
    check_policies,
    choose_port,
    config_of,
    ending,
    introduced,
    local_address,
    remember_port,
)
from swarmnode.node.showing.node_status import Summary
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


def summary(peer: str, rounds: int = 2) -> Summary:
    return Summary(peer, rounds, 100 * rounds, 1.5 * rounds, 0.1, 0.2, rounds, {}, rounds, "all rounds done")


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
    assert introduced(first, []).config.network.seeds == (friend,)
    assert introduced(second, [address]).config.network.seeds == (friend, address)


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


def test_one_policy_ends_with_its_summary() -> None:
    result = ending(seats(settings()), [summary("a")])
    assert result.exit_code == 0
    assert json.loads(result.line)["peer"] == "a"


def test_the_only_policys_error_is_the_processes() -> None:
    with pytest.raises(EngineError, match="gone"):
        ending(seats(settings()), [EngineError("gone")])


def test_several_policies_end_with_all_summaries_and_totals() -> None:
    result = ending(seats(settings("node.policies=2")), [summary("a", 2), summary("b", 3)])
    found = json.loads(result.line)
    assert [policy["peer"] for policy in found["policies"]] == ["a", "b"]
    assert found["totals"] == {"rounds": 5, "tokens": 500, "seconds": 4.5, "failed": 0}
    assert result.exit_code == 0


@pytest.mark.parametrize("policies", [1, 2])
def test_rounds_that_could_not_be_saved_fail_the_process(policies: int) -> None:
    done = [summary("a"), replace(summary("b"), not_saved="round 2 could not be saved: the disk is full")]
    result = ending(seats(settings(f"node.policies={policies}")), done[-policies:])
    assert result.exit_code == StorageError.exit_code and "the disk is full" in result.line


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (CheckpointError("damaged"), "damaged", CheckpointError.exit_code),
        (KeyError("bug"), "KeyError: 'bug'", 1),
        (ExceptionGroup("tasks", [ExceptionGroup("task", [ValueError("7")])]), "ValueError: 7", 1),
        (
            ExceptionGroup("tasks", [KeyError("bug"), CheckpointError("damaged")]),
            "damaged",
            CheckpointError.exit_code,
        ),
    ],
)
def test_one_failed_policy_fails_the_process_and_the_others_results_are_kept(
    error: Exception, text: str, code: int
) -> None:
    both = seats(settings("node.policies=2"))
    result = ending(both, [error, summary("b")])
    first, second = json.loads(result.line)["policies"]
    assert first == {"peer": both[0].key.peer_id, "error": text}
    assert second["peer"] == "b"
    assert result.exit_code == code


def test_where_all_fail_the_first_error_is_told() -> None:
    both = seats(settings("node.policies=2"))
    with pytest.raises(CheckpointError):
        ending(both, [CheckpointError("damaged"), EngineError("gone")])
    with pytest.raises(KeyError):
        ending(both, [CheckpointError("damaged"), KeyError("bug")])


def test_a_port_that_is_set_and_taken_is_refused_whatever_was_free_last_time(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        remember_port(paths, (f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}",))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        network = settings("network.listen=127.0.0.1", f"network.port={taken.getsockname()[1]}").network
        with pytest.raises(PortInUse, match="is in use or not allowed"):
            choose_port(network, paths)


def test_an_address_of_another_machine_is_no_address_to_listen_on(tmp_path: Path) -> None:
    with pytest.raises(PortInUse, match=r"port \(any\) on 203\.0\.113\.9"):
        choose_port(settings("network.listen=203.0.113.9").network, resolve_paths(tmp_path))
