"""A key as text comes back as it was, and no key is lost by it."""

from base64 import b64encode
from pathlib import Path

import pytest

from swarmnode.errors import IdentityError
from swarmnode.extensions.home.key_text import export_key, import_key
from swarmnode.identity.key_file import load, load_or_create
from swarmnode.identity.node_key import NodeKey
from tests.unit.identity.test_key_file import mode_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identity" / "node.key"


def exported(key: NodeKey) -> str:
    return f"swarmnode-key-1:{key.peer_id}:{b64encode(key.to_protobuf()).decode()}"


def test_an_exported_key_can_be_imported_elsewhere(path: Path, tmp_path: Path):
    key = load_or_create(path)
    elsewhere = tmp_path / "elsewhere" / "node.key"
    assert import_key(f"  {export_key(path)}\n", elsewhere) == key
    assert load(elsewhere) == key
    assert mode_of(elsewhere) == 0o600


def test_importing_over_a_key_is_refused_unless_asked_for(path: Path):
    key = load_or_create(path)
    other = exported(NodeKey.generate())
    with pytest.raises(IdentityError, match="already holds"):
        import_key(other, path)
    assert load(path) == key


def test_importing_over_a_key_keeps_the_old_one(path: Path):
    old, new = load_or_create(path), NodeKey.generate()
    assert import_key(exported(new), path, overwrite=True) == new
    assert load(path) == new
    [backup] = path.parent.glob("node.key.*.bak")
    assert load(backup) == old
    assert mode_of(backup) == 0o600


def test_importing_twice_in_one_second_keeps_both_old_keys(path: Path):
    first, second, third = load_or_create(path), NodeKey.generate(), NodeKey.generate()
    import_key(exported(second), path, overwrite=True)
    import_key(exported(third), path, overwrite=True)
    assert {load(backup).seed for backup in path.parent.glob("*.bak")} == {first.seed, second.seed}


def test_a_damaged_key_is_kept_too_when_another_is_imported_over_it(path: Path):
    path.parent.mkdir()
    path.write_bytes(b"what is left of a key")
    import_key(exported(NodeKey.generate()), path, overwrite=True)
    [backup] = path.parent.glob("node.key.*.bak")
    assert backup.read_bytes() == b"what is left of a key"


def test_text_that_is_no_exported_key_is_refused(path: Path):
    good, other = exported(NodeKey.generate()), exported(NodeKey.generate())
    damaged = [
        "",
        "hello",
        good[:-4],
        good.replace("swarmnode-key-1", "swarmnode-key-9"),
        good + "\u00e9",
        ":".join([*good.split(":")[:2], other.split(":")[2]]),
    ]
    for text in damaged:
        with pytest.raises(IdentityError) as caught:
            import_key(text, path)
        assert "export" in caught.value.hint
    assert not path.exists()
