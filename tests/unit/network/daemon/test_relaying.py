"""Places at relays: what the daemon is asked for, and what it grants."""

import shutil
from collections.abc import Mapping
from importlib import util
from pathlib import Path

import pytest

from swarmnode.errors import NetworkError
from swarmnode.identity.key_file import load_or_create
from swarmnode.machine.storage import resolve_paths
from swarmnode.network.daemon.control_client import PeerAddresses
from swarmnode.network.daemon.daemon_process import RELAY_BYTES, RELAY_TIME_S, DaemonOptions
from swarmnode.network.daemon.daemon_supervisor import DaemonSupervisor
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.daemon.relaying import grants_what_was_asked, limits_of
from swarmnode.network.framing import encode_frame, encode_uvarint
from swarmnode.network.multiaddr import by_reach, is_for_outsiders
from swarmnode.node.building.assemble import check_network, relays_of
from swarmnode.settings.config import Config

needs_daemon = pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed")

PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
RELAY = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"


def options(folder: Path, **how: object) -> list[str]:
    return DaemonOptions(folder / "key", ("/ip4/0.0.0.0/tcp/1",), (), **how).arguments(folder)  # type: ignore[arg-type]


def settings(*assignments: tuple[str, Mapping[str, object]]) -> Config:
    return Config.model_validate(dict(assignments))


def test_a_relay_asks_for_limits_and_whoever_uses_one_offers_none(tmp_path: Path) -> None:
    serving = options(tmp_path, relay_for_others=True)
    assert {"-relayService=1", f"-relayDataLimit={RELAY_BYTES}", f"-relayTimeLimit={RELAY_TIME_S}s"} <= set(
        serving
    )
    using = options(tmp_path, relays=(RELAY,))
    assert {"-relayService=0", "-relayDiscovery=0", "-autoRelay=1", f"-trustedRelays={RELAY}"} <= set(using)
    dialling = options(tmp_path, relays=())
    assert {"-relay=1", "-relayService=0"} <= set(dialling) and "-autoRelay=1" not in dialling


def reply(seconds: int, size_bytes: int, status: int = 100) -> bytes:
    limit = b"\x08" + encode_uvarint(seconds) + b"\x10" + encode_uvarint(size_bytes)
    return b"\x08\x02\x22" + encode_frame(limit) + b"\x28" + encode_uvarint(status)


def test_the_limits_of_a_reservation_are_read_and_a_refusal_has_none() -> None:
    assert limits_of(reply(RELAY_TIME_S, RELAY_BYTES)) == (RELAY_TIME_S, RELAY_BYTES)
    assert limits_of(reply(1, 1, status=200)) is None
    assert limits_of(b"\x28\x64") == (0, 0)


@pytest.mark.parametrize("damaged", [b"\x22\x7f", b"\x22", b"\x21\x00", b"\x20\x01\x28\x64", b"\xff" * 20])
def test_what_is_no_reply_of_a_relay_is_refused(damaged: bytes) -> None:
    with pytest.raises(NetworkError):
        limits_of(damaged)


def test_a_place_at_a_relay_is_told_after_an_address_of_our_own() -> None:
    relayed, direct = f"{RELAY}/p2p-circuit/p2p/{PEER}", f"/ip4/192.0.2.8/tcp/1/p2p/{PEER}"
    assert by_reach([relayed, direct]) == (direct, relayed)
    assert not is_for_outsiders(relayed)


def test_only_a_pipeline_member_that_nobody_can_dial_takes_a_place_at_its_seeds(tmp_path: Path) -> None:
    paths, seeds = resolve_paths(tmp_path), {"seeds": [RELAY], "listen": "192.168.1.20"}
    member = ("pipeline", {"name": "big"})
    assert relays_of(settings(("network", seeds)), paths) is None
    assert relays_of(settings(("network", seeds), member), paths) == (RELAY,)
    announced = {**seeds, "announce": ["/dns4/a.org/tcp/1"]}
    assert relays_of(settings(("network", announced), member), paths) == ()
    assert relays_of(settings(("network", {**seeds, "listen": "8.8.8.8"}), member), paths) == ()
    assert relays_of(settings(("network", {**seeds, "relays": "none"}), member), paths) is None
    assert relays_of(settings(("network", {**seeds, "relays": "seeds"})), paths) == (RELAY,)
    assert relays_of(settings(("network", {"relays": [RELAY]})), paths) == (RELAY,)


def test_a_mistyped_relay_is_told_before_the_start() -> None:
    with pytest.raises(NetworkError, match="/p2p/"):
        check_network(settings(("network", {"relays": ["/ip4/192.0.2.7/tcp/4001"]})).network)


@needs_daemon
async def test_a_node_that_relays_lets_through_what_it_says(tmp_path: Path) -> None:
    load_or_create(tmp_path / "key")
    async with P2pdHost(tmp_path / "key", relay_for_others=True) as host:
        assert host.status().relays_for_others
        (address, *_) = await host.addresses()
        place = PeerAddresses(host.peer_id, (address.rpartition("/p2p/")[0],))
        folder = tmp_path / "t"
        folder.mkdir()
        assert await grants_what_was_asked(place, folder)
        shutil.rmtree(folder)


@needs_daemon
async def test_a_node_whose_limits_are_never_taken_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: DaemonSupervisor, control: object) -> bool:
        return False

    monkeypatch.setattr("swarmnode.network.daemon.daemon_supervisor.RELAY_STARTS", 2)
    monkeypatch.setattr(DaemonSupervisor, "_relays_as_asked", never)
    load_or_create(tmp_path / "key")
    async with P2pdHost(tmp_path / "key", relay_for_others=True) as host:
        assert host.status().state == "up" and not host.status().relays_for_others


@pytest.mark.parametrize("error", [OSError("no space left on device"), NetworkError("it does not start")])
async def test_a_relay_that_cannot_be_tested_is_none_and_nothing_else_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("swarmnode.network.daemon.relaying.start_daemon", fails)
    assert not await grants_what_was_asked(PeerAddresses(PEER, ()), tmp_path)
    assert not await grants_what_was_asked(PeerAddresses(PEER, ()), tmp_path / "gone")
