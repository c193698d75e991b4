import logging
import multiprocessing
import os
from pathlib import Path
from stat import S_IMODE

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarmnode.errors import IdentityError
from swarmnode.identity.key_file import load, load_or_create
from swarmnode.identity.node_key import NodeKey


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identity" / "node.key"


def mode_of(path: Path) -> int:
    return S_IMODE(path.stat().st_mode)


def test_the_first_run_makes_a_key_and_the_next_one_finds_it(path: Path):
    first = load_or_create(path)
    assert load_or_create(path) == first
    assert load_or_create(path).peer_id == first.peer_id


def test_a_new_key_and_its_folder_are_readable_by_their_owner_alone(path: Path):
    umask = os.umask(0)
    try:
        load_or_create(path)
    finally:
        os.umask(umask)
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700


def test_nothing_but_the_key_is_left_in_its_folder(path: Path):
    load_or_create(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]


def test_the_file_is_the_private_key_that_libp2p_reads(path: Path):
    key = load_or_create(path)
    assert path.read_bytes() == bytes.fromhex("08011240") + key.seed + key.public_bytes
    assert len(path.read_bytes()) == 68


def test_two_keys_are_two_nodes():
    assert NodeKey.generate().peer_id != NodeKey.generate().peer_id


def test_the_seed_decides_the_peer_id_and_the_name():
    key = NodeKey(bytes(range(32)))
    assert key.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    assert key.name == "humble-navy-dolphin"


def test_a_signature_is_checked_with_the_public_half():
    key = NodeKey.generate()
    Ed25519PublicKey.from_public_bytes(key.public_bytes).verify(key.sign(b"hello"), b"hello")


def test_the_seed_is_not_shown_in_logs():
    key = NodeKey(b"\x41" * 32)
    assert "AAAA" not in repr(key)
    assert "4141" not in repr(key)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        NodeKey(bytes(32)).to_protobuf()[:20],
        NodeKey(bytes(32)).to_protobuf() + b"\0",
        b"\x08\x00" + NodeKey(bytes(32)).to_protobuf()[2:],
        NodeKey(bytes(32)).to_protobuf()[:-1] + b"\0",
    ],
    ids=["empty", "garbage", "too short", "too long", "another key type", "foreign public half"],
)
def test_a_file_that_is_no_key_is_an_error_and_stays_as_it_is(path: Path, content: bytes):
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError) as caught:
        load_or_create(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert path.read_bytes() == content


def test_a_folder_in_the_place_of_the_key_is_an_error(path: Path):
    path.mkdir(parents=True)
    with pytest.raises(IdentityError, match="cannot read"):
        load_or_create(path)


def test_a_dangling_link_is_an_error_and_not_a_new_identity(path: Path):
    path.parent.mkdir()
    path.symlink_to(path.parent / "unmounted" / "node.key")
    with pytest.raises(IdentityError, match="cannot read"):
        load_or_create(path)


def test_a_folder_that_cannot_be_made_is_an_error_with_a_hint(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(IdentityError) as caught:
        load_or_create(tmp_path / "file" / "node.key")
    assert "--home" in caught.value.hint


def test_a_key_that_others_may_read_is_repaired_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture):
    key = load_or_create(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert load(path) == key
    assert mode_of(path) == 0o600
    assert "0644" in caplog.text
    caplog.clear()
    assert load(path) == key and not caplog.text


def make_key(path: Path, barrier, results) -> None:
    barrier.wait()
    results.put(load_or_create(path).peer_id)


def test_processes_that_start_together_agree_on_one_key(path: Path):
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(3), spawn.Queue()
    processes = [spawn.Process(target=make_key, args=(path, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    made = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert made == {load(path).peer_id}
