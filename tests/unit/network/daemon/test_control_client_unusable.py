"""Whatever bytes a peer gets into an answer of the daemon, they raise nothing and cost no honest entry."""

import asyncio
import logging
import tempfile
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import HostDown
from swarmnode.network.daemon import control_client
from swarmnode.network.daemon.control_client import ControlClient, DaemonRefused, PeerAddresses, Unusable
from swarmnode.network.daemon.hivemind_wheel import load_messages
from swarmnode.network.daemon.p2pd_host import namespace_cid
from swarmnode.network.framing import encode_frame, encode_uvarint, read_frame
from swarmnode.network.multiaddr import (
    MAX_ADDRESSES_READ,
    address_to_bytes,
    by_reach,
    peer_id_to_bytes,
    readable_addresses,
)
from swarmnode.network.skip_counters import SkipCounters

pytestmark = pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed")

HONEST = PeerAddresses("12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp", ("/ip4/192.0.2.7/tcp/4001",))
CID = namespace_cid("a swarm")

addresses = st.one_of(
    st.binary(max_size=64),
    st.builds(lambda name: b"\x36" + encode_frame(name), st.binary(max_size=600)),  # /dns4/
    st.builds(lambda peer: b"\xa5\x03" + encode_frame(peer), st.binary(max_size=64)),  # /p2p/
    st.builds(
        lambda ip, rest: b"\x04" + ip + rest, st.binary(min_size=4, max_size=4), st.binary(max_size=16)
    ),
)
ids = st.one_of(
    st.binary(max_size=128),
    st.builds(lambda key: b"\x00" + encode_uvarint(len(key)) + key, st.binary(max_size=128)),
)
records = st.lists(st.tuples(ids, st.lists(addresses, max_size=4)), max_size=6)


def info(peer: bytes, addrs: list[bytes]) -> Any:
    return load_messages().PeerInfo(id=peer, addrs=addrs)


def honest() -> Any:
    return info(peer_id_to_bytes(HONEST.peer_id), [address_to_bytes(each) for each in HONEST.addresses])


def framed(message: Any) -> bytes:
    return encode_frame(message.SerializeToString())


def response(**fields: Any) -> bytes:
    pb = load_messages()
    return framed(pb.Response(type=pb.Response.OK, **fields))


def found(peer: Any) -> bytes:
    pb = load_messages()
    return framed(pb.DHTResponse(type=pb.DHTResponse.VALUE, peer=peer))


def told(script: bytes, ask: Any, skipped: SkipCounters | None = None) -> Any:
    """What the client makes of an answer."""

    async def answered() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_frame(reader, 10_000)
            writer.write(script)
            await reader.read()  # until the client hangs up
            writer.close()
            await writer.wait_closed()
            served.set()

        served = asyncio.Event()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "s"
            async with await asyncio.start_unix_server(serve, str(path)):
                try:
                    return await ask(ControlClient(path, skipped))
                finally:
                    await served.wait()

    return asyncio.run(answered())


def lookup(control: ControlClient) -> Any:
    return control.find_providers(CID, 1000, 5)


def begin() -> bytes:
    pb = load_messages()
    return response(dht=pb.DHTResponse(type=pb.DHTResponse.BEGIN))


def end() -> bytes:
    pb = load_messages()
    return framed(pb.DHTResponse(type=pb.DHTResponse.END))


@given(st.lists(addresses, max_size=20))
def test_whatever_a_peer_calls_its_addresses_what_is_kept_can_be_used(claimed: list[bytes]):
    kept = readable_addresses([*claimed, address_to_bytes(HONEST.addresses[0])])
    assert kept[-1] == HONEST.addresses[0]
    assert len(by_reach(kept)) == len(kept)
    assert all(address_to_bytes(address) for address in kept)


@settings(deadline=None)
@given(records, records)
def test_connections_of_peers_that_nobody_can_be_hide_no_other(before: Any, after: Any):
    peers = [*(info(*each) for each in before), honest(), *(info(*each) for each in after)]
    assert HONEST in told(response(peers=peers), lambda control: control.connected_peers())


@settings(deadline=None)
@given(records, records)
def test_provider_records_that_make_no_sense_hide_no_other(before: Any, after: Any):
    peers = [*(info(*each) for each in before), honest(), *(info(*each) for each in after)]
    assert HONEST in told(begin() + b"".join(map(found, peers)) + end(), lookup)


@settings(deadline=None)
@given(st.lists(addresses, max_size=6), ids)
def test_the_addresses_of_a_peer_are_those_that_can_be_read(claimed: list[bytes], named: bytes):
    pb = load_messages()
    answer = pb.DHTResponse(type=pb.DHTResponse.VALUE, peer=info(named, [*claimed, honest().addrs[0]]))
    peer = told(response(dht=answer), lambda control: control.find_peer(HONEST.peer_id, 5))
    assert peer.peer_id == HONEST.peer_id
    assert HONEST.addresses[0] in peer.addresses


@settings(deadline=None)
@given(ids, st.binary(max_size=100))
def test_gossip_of_anybody_is_a_message_or_unusable_and_the_next_one_is_heard(author: bytes, data: bytes):
    async def heard() -> None:
        pb, reader = load_messages(), asyncio.StreamReader()
        for sender in (author, peer_id_to_bytes(HONEST.peer_id)):
            reader.feed_data(framed(pb.PSMessage(**{"from": sender, "data": data})))
        control = ControlClient(Path("nobody"))
        with suppress(Unusable):
            await control.read_gossip(reader)
        assert (await control.read_gossip(reader)).sender == HONEST.peer_id
        reader.feed_eof()
        with pytest.raises(HostDown):
            await control.read_gossip(reader)

    asyncio.run(heard())


@settings(deadline=None)
@given(ids)
def test_a_stream_of_anybody_is_his_or_unusable(peer: bytes):
    async def announced() -> None:
        pb, reader = load_messages(), asyncio.StreamReader()
        reader.feed_data(framed(pb.StreamInfo(peer=peer, addr=b"\xff", proto="/echo")))
        with suppress(Unusable):
            assert (await ControlClient(Path("nobody")).read_stream_info(reader))[1] == "/echo"

    asyncio.run(announced())


def test_a_record_with_a_short_id_is_counted_and_told_once(caplog: pytest.LogCaptureFixture):
    skipped = SkipCounters()
    script = begin() + found(info(b"abc", [])) * 3 + found(honest()) + end()
    with caplog.at_level(logging.DEBUG, "swarmnode"):
        assert told(script, lookup, skipped) == (HONEST,)
    assert skipped.counts() == {"provider_record": 3}
    assert len(caplog.records) == 1


def test_records_that_make_no_sense_do_not_use_up_what_was_asked_for():
    script = begin() + found(info(b"abc", [])) * 200 + found(honest()) + end()
    assert told(script, lambda control: control.find_providers(CID, 1, 5)) == (HONEST,)


def test_a_record_that_is_too_large_ends_the_lookup_with_what_it_found(monkeypatch: pytest.MonkeyPatch):
    skipped = SkipCounters()
    monkeypatch.setattr(control_client, "MAX_REPLY_BYTES", 1000)
    script = begin() + found(honest()) + found(info(b"abc", [bytes(2000)])) + end()
    assert told(script, lookup, skipped) == (HONEST,)
    assert skipped.counts() == {"provider_record": 1}


def test_a_peer_with_more_addresses_than_can_be_told_says_nothing_about_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(control_client, "MAX_REPLY_BYTES", 1000)
    pb = load_messages()
    answer = response(dht=pb.DHTResponse(type=pb.DHTResponse.VALUE, peer=info(b"abc", [bytes(2000)])))
    with pytest.raises(Unusable):
        told(answer, lambda control: control.find_peer(HONEST.peer_id, 5))


def test_of_endless_addresses_a_bounded_number_is_looked_at():
    assert len(readable_addresses([address_to_bytes("/ip4/192.0.2.7/tcp/1")] * 10_000)) == MAX_ADDRESSES_READ


def test_a_refusal_that_is_no_text_is_a_refusal():
    pb = load_messages()
    error = pb.ErrorResponse()
    error.ParseFromString(b"\x0a\x06\xff\xfe\x1b[2J")
    script = framed(pb.Response(type=pb.Response.ERROR, error=error))
    with pytest.raises(DaemonRefused) as caught:
        told(script, lambda control: control.connect(HONEST, 5))
    assert caught.value.message.isprintable()
