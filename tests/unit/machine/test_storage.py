import os
from pathlib import Path

import pytest

from swarmnode.machine.storage import (
    builtin_folder,
    discard,
    make_folder,
    replace_file,
    resolve_paths,
    whole_folder,
)
from tests.full_disk import full_disk


def test_one_variable_moves_everything() -> None:
    paths = resolve_paths(environ={"SWARMNODE_HOME": "/srv/node"})
    everything = [paths.identity, paths.checkpoints, paths.peers, paths.logs, paths.running, paths.models]
    assert all(Path("/srv/node") in path.parents for path in [*everything, paths.user_config])


def test_the_home_option_wins_over_the_variable() -> None:
    assert resolve_paths(Path("/a"), {"SWARMNODE_HOME": "/b"}).data == Path("/a/data")


def test_without_either_the_xdg_folders_are_used() -> None:
    environ = {"XDG_DATA_HOME": "/d", "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_CONFIG_HOME": "/g"}
    paths = resolve_paths(environ=environ)
    assert (paths.data, paths.cache, paths.state, paths.config) == tuple(
        Path(f"/{letter}/swarmnode") for letter in "dcsg"
    )


def test_the_identity_is_not_in_the_cache() -> None:
    paths = resolve_paths(Path("/home"))
    assert paths.cache not in paths.identity.parents


def test_presets_and_rewards_are_found_from_a_checkout() -> None:
    assert (builtin_folder("configs") / "tiny.toml").is_file()
    assert builtin_folder("rewards").is_dir()


def test_a_folder_is_whole_or_not_there_and_replaces_the_former(tmp_path: Path) -> None:
    target = tmp_path / "above" / "folder"
    for number in "12":
        with whole_folder(target) as aside:
            (aside / number).touch()
        assert [path.name for path in target.iterdir()] == [number]
    with pytest.raises(OSError, match="full"), whole_folder(target) as aside:
        (aside / "3").touch()
        raise OSError("the disk is full")
    assert [path.name for path in target.iterdir()] == ["2"]
    assert [*target.parent.iterdir()] == [target]


def test_a_folder_that_was_made_meanwhile_stays_where_nothing_is_to_be_replaced(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with pytest.raises(FileExistsError), whole_folder(target, replaces=False):
        target.mkdir()
        (target / "of somebody else").touch()
    assert [path.name for path in target.iterdir()] == ["of somebody else"]
    assert [*tmp_path.iterdir()] == [target]


def test_the_former_folder_is_put_back_where_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "folder", Path.rename

    def rename_old_ones(path: Path, to: Path) -> Path:
        if path != target and not path.name.endswith(".old"):
            raise OSError("the disk is full")
        return rename(path, to)

    target.mkdir()
    (target / "1").touch()
    monkeypatch.setattr(Path, "rename", rename_old_ones)
    with pytest.raises(OSError, match="full"), whole_folder(target):
        pass
    assert [path.name for path in target.iterdir()] == ["1"] and [*tmp_path.iterdir()] == [target]


def test_a_folder_that_is_discarded_is_gone(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "file").touch()
    discard(target)
    assert not [*tmp_path.iterdir()]


def test_what_a_disk_does_not_take_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    target = tmp_path / "library.jsonl"
    target.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match="File too large") as caught:
        replace_file(target, b"new")
    assert caught.value.filename == str(target)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_folders_of_a_home_are_for_their_owner_alone_and_those_of_others_stay_as_they_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    umask = os.umask(0)
    try:
        make_folder(tmp_path / "shared" / "home" / "state" / "logs")
    finally:
        os.umask(umask)
    logs = tmp_path / "shared" / "home" / "state" / "logs"
    assert [path.stat().st_mode & 0o777 for path in (logs, *logs.parents[:3])] == [0o700, 0o700, 0o700, 0o755]
