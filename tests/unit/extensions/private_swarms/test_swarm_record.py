"""What a home keeps of a private swarm: an invitation is all a friend needs, the founder alone changes it."""

from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.private_swarms.manifest import MAX_LISTED, signed
from swarmnode.extensions.private_swarms.private_swarm import PrivateSwarm, SwarmUpdate
from swarmnode.extensions.private_swarms.swarm_key import SwarmKey
from swarmnode.extensions.private_swarms.swarm_record import (
    SwarmRecord,
    accept,
    changed,
    founded,
    load,
    names_in,
    record_of,
    save,
    succeeded,
)
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.admission import file_of
from swarmnode.network.finding.invitation import Invitation, read_invitation

FOUNDER, FRIEND, MALLORY = (NodeKey(bytes([number]) * 32) for number in range(3))
SEED = f"/ip4/192.0.2.7/tcp/4001/p2p/{FOUNDER.peer_id}"


def friends() -> SwarmRecord:
    return founded("friends", FOUNDER, (SEED,))


def kept(record: SwarmRecord, folder: Path) -> PrivateSwarm:
    path = file_of(folder, record.name)
    save(record, path)
    return PrivateSwarm(path, folder / "met.json")


def test_an_invitation_makes_a_friends_home_a_member(tmp_path: Path):
    record = friends()
    accept(read_invitation(record.invitation(()).text()), tmp_path)
    found = record_of(tmp_path, "friends")
    assert found is not None
    assert (found.key, found.founder, found.seeds) == (record.key, record.founder, (SEED,))
    assert found.manifest is None
    assert names_in(tmp_path) == ("friends",)
    assert record_of(tmp_path, "commons") is None


def test_the_key_is_readable_by_its_owner_alone(tmp_path: Path):
    path = file_of(tmp_path, "friends")
    save(friends(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert load(path).name == "friends"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_key_is_an_error_and_never_a_public_swarm(tmp_path: Path):
    path = file_of(tmp_path, "friends")
    save(friends(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(NetworkError, match="damaged"):
        record_of(tmp_path, "friends")


@pytest.mark.parametrize("name", ["../../evil", "a/b", "", ".hidden", "Friends"])
def test_a_name_that_would_be_another_file_is_refused(tmp_path: Path, name: str):
    with pytest.raises(NetworkError, match="not the name"):
        accept(Invitation(name=name, key=bytes(64)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_invitation_to_another_swarm_of_the_same_name_changes_nothing(tmp_path: Path):
    record = friends()
    accept(record.invitation(()), tmp_path)
    with pytest.raises(NetworkError, match="another private swarm"):
        accept(founded("friends", MALLORY, ()).invitation(()), tmp_path)
    found = record_of(tmp_path, "friends")
    assert found is not None and found.key == record.key


def test_only_the_founder_changes_the_list():
    with pytest.raises(NetworkError, match="founded by another"):
        changed(friends(), MALLORY, new_key=True)
    with pytest.raises(NetworkError, match="founder cannot be removed"):
        changed(friends(), FOUNDER, remove=[FOUNDER.peer_id])
    with pytest.raises(NetworkError, match="not a peer id"):
        changed(friends(), FOUNDER, remove=["bob"])


def test_a_new_key_is_handed_to_members_by_whoever_has_it_and_to_nobody_else(tmp_path: Path):
    before = friends()
    after = changed(
        before, FOUNDER, members=[FRIEND.peer_id, MALLORY.peer_id], remove=[MALLORY.peer_id], new_key=True
    )
    swarm = kept(after, tmp_path)
    assert after.key != before.key
    news = swarm.news_for(FRIEND.peer_id, before.key, 1)
    assert news is not None and news.secret == after.key.secret
    assert swarm.news_for(MALLORY.peer_id, before.key, 1) is None
    assert swarm.news_for(NodeKey(b"s" * 32).peer_id, before.key, 1) is None
    friend = kept(replace(before, signed_list=b""), tmp_path / "friend")
    friend.hear(news)
    assert friend.key == after.key
    assert load(file_of(tmp_path / "friend", "friends")).secrets == (after.key.secret, before.key.secret)
    handed_on = friend.news_for(FOUNDER.peer_id, before.key, 1)
    assert handed_on is not None and handed_on.secret == after.key.secret


def test_a_list_is_taken_from_its_founder_only_and_never_an_older_one():
    first = friends()
    second = changed(first, FOUNDER, publishers=[FRIEND.peer_id])
    assert succeeded(first, second.signed_list, b"") == second
    assert succeeded(second, first.signed_list, b"") is None
    assert first.manifest is not None
    forged = signed(replace_version(first, 9), MALLORY)
    with pytest.raises(Rejected, match="not_the_founder"):
        succeeded(first, forged, b"")
    with pytest.raises(Rejected, match="another_swarm"):
        succeeded(first, founded("others", FOUNDER, ()).signed_list, b"")


def test_a_friend_who_was_just_invited_is_not_led_back_to_a_key_that_is_over(tmp_path: Path):
    """A member hands it the list and the key of before the rotation: that is where the removed one waits."""
    before = friends()
    after = changed(before, FOUNDER, remove=[MALLORY.peer_id], new_key=True)
    accept(read_invitation(after.invitation(()).text()), tmp_path)
    friend = PrivateSwarm(file_of(tmp_path, "friends"), tmp_path / "met.json")
    friend.hear(SwarmUpdate(before.signed_list, before.key.secret))
    assert friend.key == after.key and friend.version == 0
    friend.hear(SwarmUpdate(after.signed_list))
    assert friend.removed == {MALLORY.peer_id}


def test_a_second_invitation_does_not_make_a_home_forget_how_far_the_list_had_come(tmp_path: Path):
    first = friends()
    second = changed(first, FOUNDER, publishers=[FRIEND.peer_id])
    save(second, file_of(tmp_path, "friends"))
    accept(replace(first, secrets=(SwarmKey.generate().secret,), signed_list=b"").invitation(()), tmp_path)
    found = record_of(tmp_path, "friends")
    assert found is not None and found.manifest is None
    assert succeeded(found, first.signed_list, first.key.secret) is None
    assert succeeded(found, second.signed_list, second.key.secret) is not None


def test_a_member_with_a_thousand_names_does_not_keep_the_founder_from_a_new_key():
    first = changed(friends(), FOUNDER, members=[FRIEND.peer_id])
    names = [NodeKey(number.to_bytes(32, "big")).peer_id for number in range(10, 10 + MAX_LISTED)]
    after = changed(first, FOUNDER, members=names, new_key=True)
    assert after.manifest is not None
    assert len(after.manifest.members) == MAX_LISTED
    assert {FOUNDER.peer_id, FRIEND.peer_id} <= set(after.manifest.members)
    chosen = changed(after, FOUNDER, members=names, only=[FRIEND.peer_id], new_key=True)
    assert chosen.manifest is not None
    assert set(chosen.manifest.members) == {FOUNDER.peer_id, FRIEND.peer_id}


def test_a_key_that_the_founder_has_not_signed_for_is_not_taken():
    first = friends()
    rotated = changed(first, FOUNDER, new_key=True)
    for secret in (b"", first.key.secret, b"m" * 32):
        with pytest.raises(Rejected, match="another_key"):
            succeeded(first, rotated.signed_list, secret)


def test_the_list_says_who_may_publish_as_it_is_now(tmp_path: Path):
    record = friends()
    swarm = kept(record, tmp_path)
    assert FRIEND.peer_id in swarm and MALLORY.peer_id in swarm
    swarm.hear(SwarmUpdate(changed(record, FOUNDER, publishers=[FRIEND.peer_id]).signed_list))
    assert FRIEND.peer_id in swarm and MALLORY.peer_id not in swarm


def test_a_running_node_follows_what_a_command_writes_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "swarmnode")
    record = friends()
    swarm = kept(record, tmp_path)
    swarm.refresh()
    assert swarm.record == record
    save(changed(record, FOUNDER, remove=[MALLORY.peer_id], new_key=True), file_of(tmp_path, "friends"))
    swarm.refresh()
    assert swarm.removed == {MALLORY.peer_id} and swarm.key != record.key
    news = f"private swarm friends: list 2 of its founder, a new key, removed: {MALLORY.peer_id}"
    assert caplog.messages == [news]
    file_of(tmp_path, "friends").write_text("rubbish")
    swarm.refresh()
    assert swarm.removed == {MALLORY.peer_id}


def replace_version(record: SwarmRecord, version: int):
    import msgspec

    assert record.manifest is not None
    return msgspec.structs.replace(record.manifest, version=version)
