from pathlib import Path

from swarmnode.machine.storage import builtin_folder, resolve_paths


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
