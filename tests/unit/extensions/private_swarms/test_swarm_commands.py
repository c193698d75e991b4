"""`swarmnode swarm` with a command keeps a private swarm; without one it is the local swarm, as ever."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.cli.settings import invited
from swarmnode.errors import ConfigError, NetworkError
from swarmnode.extensions.private_swarms.private_swarm import MetMembers
from swarmnode.extensions.private_swarms.swarm_record import record_of
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import resolve_paths
from swarmnode.network.admission import admission_to, file_of

PEER = NodeKey(b"p" * 32).peer_id
GONE = NodeKey(b"g" * 32).peer_id


def swarm(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["swarm", *arguments, "--home", str(home)])


def test_the_invitation_of_a_founder_is_all_that_a_friend_needs(tmp_path: Path) -> None:
    seed = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"
    made = swarm(tmp_path / "founder", "create", "friends", "--private", "--seed", seed)
    assert made.exit_code == 0
    name, addresses = invited(tmp_path / "friend", None, [made.stdout.strip()])
    assert (name, addresses) == ("friends", [seed])
    ours, theirs = (
        record_of(resolve_paths(tmp_path / home).swarms, "friends") for home in ("founder", "friend")
    )
    assert ours is not None and theirs is not None and ours.key == theirs.key
    assert isinstance(swarm(tmp_path / "friend", "rotate").exception, NetworkError)


def test_who_is_removed_is_listed_so_and_every_invitation_from_before_is_out_of_date(tmp_path: Path) -> None:
    first = swarm(tmp_path, "create", "friends", "--private").stdout.strip()
    assert swarm(tmp_path, "remove", PEER).exit_code == 0
    assert swarm(tmp_path, "invite").stdout.strip() != first
    listed = json.loads(swarm(tmp_path, "members", "--json").stdout)["members"]
    assert [(row["founder"], row["removed"], row["publishes"]) for row in listed] == [
        (True, False, True),
        (False, True, False),
    ]


def test_members_lists_who_gets_the_next_key(tmp_path: Path) -> None:
    invitation = swarm(tmp_path / "founder", "create", "friends", "--private").stdout.strip()
    founders = resolve_paths(tmp_path / "founder")
    for peer in (PEER, GONE):
        MetMembers(founders.met_members("friends")).note(peer)
    swarm(tmp_path / "founder", "remove", GONE)
    lines = {line.split()[0]: line for line in swarm(tmp_path / "founder", "members").stdout.splitlines()}
    assert [peer for peer, line in lines.items() if "gets the next key" in line] == sorted(
        lines.keys() - {GONE}
    )
    invited(tmp_path / "friend", None, [invitation])
    (row,) = json.loads(swarm(tmp_path / "friend", "members", "--json").stdout)["members"]
    assert (row["founder"], row["next_key"]) == (True, False), "a friend has yet to hear the founder's list"


def test_who_was_removed_is_neither_removed_again_nor_given_a_part(tmp_path: Path) -> None:
    swarm(tmp_path, "create", "friends", "--private")
    swarm(tmp_path, "remove", PEER)
    invitation = swarm(tmp_path, "invite").stdout
    for command in (("remove", PEER), ("publishers", PEER), ("rotate", "--only", PEER)):
        refused = swarm(tmp_path, *command).exception
        assert isinstance(refused, NetworkError) and "was already removed from friends" in str(refused)
    assert swarm(tmp_path, "invite").stdout == invitation, "and the key is the same"


def test_a_private_swarm_whose_key_is_gone_is_not_joined_in_public(tmp_path: Path) -> None:
    swarm(tmp_path, "create", "friends", "--private")
    paths = resolve_paths(tmp_path)
    admission = admission_to(paths, "friends")
    assert admission is not None and admission_to(paths, "others") is None
    MetMembers(paths.met_members("friends")).note(PEER)
    file_of(paths.swarms, "friends").unlink()
    with pytest.raises(NetworkError, match="friends was private in this home"):
        admission_to(paths, "friends")


def test_a_swarm_is_neither_founded_twice_nor_public_by_mistake(tmp_path: Path) -> None:
    assert isinstance(swarm(tmp_path, "create", "friends").exception, ConfigError)
    missing = swarm(tmp_path, "members").exception
    assert isinstance(missing, NetworkError)
    assert f"swarmnode swarm create NAME --private --home {tmp_path}, or swarmnode join INV" in missing.hint
    assert swarm(tmp_path, "create", "friends", "--private").exit_code == 0
    assert isinstance(swarm(tmp_path, "create", "friends", "--private").exception, ConfigError)
    assert isinstance(swarm(tmp_path, "create", "No Name", "--private").exception, ConfigError)


def test_addresses_without_an_invitation_are_left_as_they_are(tmp_path: Path) -> None:
    assert invited(tmp_path, "attic", ["/ip4/192.0.2.7"]) == ("attic", ["/ip4/192.0.2.7"])
    assert invited(tmp_path, None, None) == (None, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", ["create", "invited"])
def test_a_home_is_made_for_its_owner_alone_whatever_is_written_first(tmp_path: Path, first: str) -> None:
    invitation = swarm(tmp_path / "create", "create", "friends", "--private").stdout.strip()
    invited(tmp_path / "invited", None, [invitation])
    assert (tmp_path / first).stat().st_mode & 0o777 == 0o700


def test_looking_at_the_members_makes_no_identity(tmp_path: Path) -> None:
    invitation = swarm(tmp_path / "founder", "create", "friends", "--private").stdout.strip()
    invited(tmp_path / "guest", None, [invitation])
    assert "founder" in swarm(tmp_path / "guest", "members").stdout
    assert not (tmp_path / "guest" / "data").exists()
