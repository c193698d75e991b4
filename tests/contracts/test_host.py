"""What every Host must do: the same tests against the fake and against the go-libp2p daemon."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from swarmnode.errors import (
    HostDown,
    MessageTooLarge,
    NetworkError,
    PeerUnreachable,
    RequestTimeout,
    SwarmnodeError,
)
from swarmnode.extensions.private_swarms.private_host import PrivateHost
from swarmnode.extensions.private_swarms.swarm_key import SEAL_BYTES
from swarmnode.network.host import MAX_GOSSIP_BYTES, Host, Message, Subscription
from tests.contracts.hosts import HostFactory, connected

TOPIC = "/swarmnode/4/test/rollouts/0"
ECHO = "/swarmnode/test/echo/1"
KIB = 1024


async def echo(peer_id: str, request: bytes) -> bytes:
    return request


async def publish_until_received(host: Host, data: bytes, subscription: Subscription) -> Message:
    """Until peers have heard of a subscription, within a heartbeat, messages may reach nobody."""
    for _ in range(200):
        await host.publish(TOPIC, data)
        try:
            return await asyncio.wait_for(anext(subscription), 0.1)
        except TimeoutError:
            continue
    raise AssertionError("nothing was received")


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(200):
        if await holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came true")


async def test_a_subscriber_receives_what_a_peer_publishes(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        subscription = await bob.subscribe(TOPIC)
        received = await publish_until_received(alice, b"\x00 any bytes \xff", subscription)
        assert received == Message(TOPIC, alice.peer_id, b"\x00 any bytes \xff")


async def test_our_own_messages_are_not_among_those_we_receive(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        at_alice, at_bob = await alice.subscribe(TOPIC), await bob.subscribe(TOPIC)
        await publish_until_received(alice, b"from alice", at_bob)
        first = await publish_until_received(bob, b"from bob", at_alice)
        assert first.data == b"from bob"


async def test_two_subscriptions_to_one_topic_both_receive(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        one, other = await bob.subscribe(TOPIC), await bob.subscribe(TOPIC)
        await publish_until_received(alice, b"for both", one)
        async with asyncio.timeout(10):
            assert (await anext(other)).data == b"for both"


async def test_a_closed_subscription_ends_and_others_go_on(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        closed, kept = await bob.subscribe(TOPIC), await bob.subscribe(TOPIC)
        await closed.aclose()
        assert [message async for message in closed] == []
        assert (await publish_until_received(alice, b"still here", kept)).data == b"still here"


async def test_closing_the_host_ends_its_subscriptions(new_host: HostFactory):
    async with new_host() as host:
        subscription = await host.subscribe(TOPIC)
    assert [message async for message in subscription] == []


async def test_publishing_succeeds_when_nobody_listens(new_host: HostFactory):
    async with new_host() as host:
        await host.publish(TOPIC, b"hello?")


async def test_a_gossip_message_over_the_bound_is_refused(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        subscription = await bob.subscribe(TOPIC)
        with pytest.raises(MessageTooLarge):
            await alice.publish(TOPIC, bytes(MAX_GOSSIP_BYTES + 1))
        most = MAX_GOSSIP_BYTES - (SEAL_BYTES if isinstance(alice, PrivateHost) else 0)
        largest = await publish_until_received(alice, bytes(most), subscription)
        assert len(largest.data) == most


async def test_a_request_is_answered_by_a_handler_that_knows_who_asks(new_host: HostFactory):
    async def greet(peer_id: str, request: bytes) -> bytes:
        return request + peer_id.encode()

    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, greet, max_request_bytes=KIB)
        answer = await alice.request(bob.peer_id, ECHO, b"I am ", max_response_bytes=KIB)
        assert answer == b"I am " + alice.peer_id.encode()


async def test_either_side_of_a_connection_may_ask(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await alice.serve(ECHO, echo, max_request_bytes=KIB)
        assert await bob.request(alice.peer_id, ECHO, b"hello", max_response_bytes=KIB) == b"hello"


async def test_an_empty_request_may_have_an_empty_response(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, echo, max_request_bytes=0)
        assert await alice.request(bob.peer_id, ECHO, b"", max_response_bytes=0) == b""


async def test_messages_up_to_the_bounds_pass_in_both_directions(new_host: HostFactory):
    size_bytes = 1024 * KIB
    body = bytes(range(256)) * (size_bytes // 256)
    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, echo, max_request_bytes=size_bytes)
        assert await alice.request(bob.peer_id, ECHO, body, max_response_bytes=size_bytes) == body


async def test_a_response_over_the_bound_is_refused(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, echo, max_request_bytes=KIB)
        with pytest.raises(MessageTooLarge):
            await alice.request(bob.peer_id, ECHO, bytes(KIB), max_response_bytes=KIB - 1)


async def test_a_request_over_the_bound_never_reaches_the_handler(new_host: HostFactory):
    seen: list[bytes] = []

    async def record(peer_id: str, request: bytes) -> bytes:
        seen.append(request)
        return b"ok"

    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, record, max_request_bytes=KIB)
        with pytest.raises((MessageTooLarge, PeerUnreachable)):
            await alice.request(bob.peer_id, ECHO, bytes(KIB + 1), max_response_bytes=KIB)
        with pytest.raises((MessageTooLarge, PeerUnreachable)):
            await alice.request(bob.peer_id, ECHO, bytes(4096 * KIB), max_response_bytes=KIB)
        assert seen == []


async def test_many_requests_at_once_are_all_answered(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, echo, max_request_bytes=KIB)
        questions = [f"question {number}".encode() for number in range(24)]
        answers = await asyncio.gather(
            *(alice.request(bob.peer_id, ECHO, question, max_response_bytes=KIB) for question in questions)
        )
        assert answers == questions


async def test_a_peer_that_nobody_knows_is_unreachable(new_host: HostFactory):
    async with connected(new_host) as (alice, _), new_host() as stranger:
        with pytest.raises(PeerUnreachable):
            await alice.request(stranger.peer_id, ECHO, b"", max_response_bytes=KIB)


async def test_a_protocol_that_the_peer_does_not_serve_is_refused(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        with pytest.raises(PeerUnreachable):
            await alice.request(bob.peer_id, ECHO, b"", max_response_bytes=KIB)


async def test_a_handler_that_raises_fails_its_request_and_no_other(
    new_host: HostFactory, caplog: pytest.LogCaptureFixture
):
    async def halve(peer_id: str, request: bytes) -> bytes:
        return str(100 // int(request)).encode()

    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, halve, max_request_bytes=KIB)
        with caplog.at_level(logging.ERROR), pytest.raises(PeerUnreachable):
            await alice.request(bob.peer_id, ECHO, b"0", max_response_bytes=KIB)
        assert "ZeroDivisionError" in caplog.text
        assert await alice.request(bob.peer_id, ECHO, b"2", max_response_bytes=KIB) == b"50"


async def test_a_peer_that_does_not_answer_in_time_is_given_up(new_host: HostFactory):
    async def sleep(peer_id: str, request: bytes) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, sleep, max_request_bytes=KIB)
        with pytest.raises(RequestTimeout):
            await alice.request(bob.peer_id, ECHO, b"", timeout_s=0.2, max_response_bytes=KIB)


async def test_serving_a_protocol_again_replaces_its_handler(new_host: HostFactory):
    async def shout(peer_id: str, request: bytes) -> bytes:
        return request.upper()

    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, echo, max_request_bytes=KIB)
        await bob.serve(ECHO, shout, max_request_bytes=KIB)
        assert await alice.request(bob.peer_id, ECHO, b"hello", max_response_bytes=KIB) == b"HELLO"


async def test_both_ends_of_a_connection_list_each_other(new_host: HostFactory):
    async with new_host() as alice, new_host() as bob:
        assert await alice.peers() == ()
        assert await alice.connect((await bob.addresses())[0]) == bob.peer_id
        assert await alice.peers() == (bob.peer_id,)

        async def bob_knows() -> bool:
            return await bob.peers() == (alice.peer_id,)

        await eventually(bob_knows)


async def test_addresses_end_in_the_peer_id(new_host: HostFactory):
    async with new_host() as host:
        addresses = await host.addresses()
        assert addresses
        assert all(address.endswith(f"/p2p/{host.peer_id}") for address in addresses)


async def test_nobody_answers_at_the_address_of_a_closed_host(new_host: HostFactory):
    async with new_host() as alice:
        async with new_host() as bob:
            address = (await bob.addresses())[0]
        with pytest.raises(PeerUnreachable):
            await alice.connect(address, timeout_s=5)


async def test_another_peer_at_the_address_is_not_accepted(new_host: HostFactory):
    async with new_host() as alice, new_host() as bob, new_host() as mallory:
        address = (await mallory.addresses())[0].replace(mallory.peer_id, bob.peer_id)
        with pytest.raises(PeerUnreachable):
            await alice.connect(address, timeout_s=5)
        assert await alice.peers() == ()


async def test_a_peer_that_is_disconnected_may_come_back(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await alice.disconnect(bob.peer_id)
        assert await alice.peers() == ()

        async def back() -> bool:
            await bob.connect((await alice.addresses())[0])
            return await bob.peers() == (alice.peer_id,)

        await eventually(back)


async def test_disconnecting_somebody_who_is_not_there_changes_nothing(new_host: HostFactory):
    async with connected(new_host) as (alice, bob), new_host() as carol:
        await alice.disconnect(carol.peer_id)
        assert await alice.peers() == (bob.peer_id,)


async def test_a_barred_peer_is_neither_dialled_nor_asked(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await bob.serve(ECHO, echo, max_request_bytes=KIB)
        await alice.disconnect(bob.peer_id, barred_s=3600)
        with pytest.raises(PeerUnreachable):
            await alice.connect((await bob.addresses())[0])
        with pytest.raises(PeerUnreachable):
            await alice.request(bob.peer_id, ECHO, b"", max_response_bytes=KIB)


async def test_a_barred_peer_that_comes_back_is_not_answered_and_is_sent_away_again(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await alice.serve(ECHO, echo, max_request_bytes=KIB)
        await alice.disconnect(bob.peer_id, barred_s=3600)
        with suppress(PeerUnreachable):
            await bob.connect((await alice.addresses())[0])
        with pytest.raises(PeerUnreachable):
            await bob.request(alice.peer_id, ECHO, b"", max_response_bytes=KIB)

        async def alone() -> bool:
            return await alice.peers() == () == await bob.peers()

        await eventually(alone)


async def test_a_peer_whose_time_is_over_is_welcome_again(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await alice.disconnect(bob.peer_id, barred_s=0.2)
        await asyncio.sleep(0.3)
        await alice.connect((await bob.addresses())[0])
        assert await alice.peers() == (bob.peer_id,)


@pytest.mark.parametrize(
    "address", ["", "localhost:4001", "/ip4/127.0.0.1/tcp/4001", "/ip4/1.2.3/tcp/1/p2p/x"]
)
async def test_a_malformed_address_is_an_error_for_people(new_host: HostFactory, address: str):
    async with new_host() as host:
        with pytest.raises(NetworkError) as caught:
            await host.connect(address)
        assert caught.value.hint


async def test_a_malformed_peer_id_is_an_error_for_people(new_host: HostFactory):
    async with new_host() as host:
        with pytest.raises(NetworkError):
            await host.request("bob", ECHO, b"", max_response_bytes=KIB)


async def test_who_advertises_is_found_through_a_common_peer(new_host: HostFactory):
    async with connected(new_host) as (alice, bob), new_host() as carol:
        await carol.connect((await bob.addresses())[0])

        async def advertised() -> bool:
            try:
                await alice.advertise("a swarm")
            except PeerUnreachable:
                return False
            return await carol.find("a swarm") == await alice.addresses()

        await eventually(advertised)
        assert await carol.find("another swarm", timeout_s=2) == ()
        assert await alice.find("a swarm", timeout_s=2) == ()
        assert await carol.connect((await carol.find("a swarm"))[0]) == alice.peer_id


async def test_advertising_without_any_peer_says_that_it_reached_nobody(new_host: HostFactory):
    async with new_host() as host:
        with pytest.raises(PeerUnreachable):
            await host.advertise("a swarm")
        assert await host.find("a swarm") == ()


async def test_a_host_outside_of_its_context_is_down(new_host: HostFactory):
    host = new_host()
    assert host.status().state == "starting"
    with pytest.raises(HostDown):
        await host.peers()
    async with host:
        assert host.status().state == "up"
    assert host.status().state == "closed"
    with pytest.raises(HostDown):
        await host.publish(TOPIC, b"")
    with pytest.raises(HostDown):
        await host.subscribe(TOPIC)


async def test_an_error_inside_the_context_comes_out_as_it_is(new_host: HostFactory):
    with pytest.raises(SwarmnodeError, match="mine"):
        async with new_host():
            raise SwarmnodeError("mine")


async def test_a_cancelled_node_closes_its_host(new_host: HostFactory):
    host = new_host()

    async def node() -> None:
        async with host:
            await asyncio.sleep(3600)

    async def is_up() -> bool:
        return host.status().state == "up"

    running = asyncio.ensure_future(node())
    await eventually(is_up)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert host.status().state == "closed"
