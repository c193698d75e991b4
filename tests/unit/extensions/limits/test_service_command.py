"""A node as a service: the texts, and what is done with the one of systemd."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import ConfigError, NetworkError, SwarmnodeError
from swarmnode.extensions.limits.service_texts import ATTEMPTS, POLICY, unit_word, user_unit

ROOT = Path(__file__).parents[4]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["service", "install", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that notes its calls in `called`, and fails while there is a file `broken`."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n'
        f'[ -e {tmp_path}/broken ] && echo "Failed to connect to bus" >&2 && exit 1\nexit 0\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SWARMNODE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_unit_of_the_images_folder_is_what_the_command_prints() -> None:
    packaged = (ROOT / "docker" / "swarmnode.service").read_text()
    assert run("--for", "system", "--print") == packaged
    assert POLICY in packaged and ATTEMPTS in packaged, "the unit of a user starts and stops it otherwise"


def test_a_service_is_written_enabled_and_started_with_the_settings_given(systemctl: Path) -> None:
    told = run("--", "--home", "a home", "--hours", "22-7", "--max-memory", "2", "--set", "policy.device=cpu")
    unit = systemctl / ".config/systemd/user/swarmnode.service"
    assert str(unit) in told and "enable-linger" in told
    text = unit.read_text()
    command = '-m swarmnode join --home "a home" --hours 22-7 --max-memory 2 --set "policy.device=cpu"'
    assert f"ExecStart={unit_word(sys.executable)} {command}\n" in text
    assert f"WorkingDirectory={systemctl}\n" in text and f"MemoryMax={2 * 2**30}\n" in text
    called = (systemctl / "called").read_text().splitlines()
    assert called == ["--user daemon-reload", "--user enable swarmnode", "--user restart swarmnode"]


def test_what_bounds_the_stage_of_a_member_is_not_what_its_process_may_take(systemctl: Path) -> None:
    given = ("--pipeline", "attic", "--model", "tiny", "--max-memory", "2", "--set", "policy.device=cpu")
    assert "MemoryMax" not in run("--print", "--", *given)


def test_a_home_of_the_environment_goes_into_the_unit(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMNODE_HOME", "there")
    assert f"join --home {systemctl}/there" in run("--print")
    assert "/there" not in run("--print", "--", "--home", "here")


def test_settings_of_the_shell_that_the_service_would_not_have_are_named(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMNODE_LIMITS__HOURS", "22-7")
    with pytest.raises(ConfigError, match=r"would not have SWARMNODE_LIMITS__HOURS") as refused:
        run("--", "--home", "here")
    assert "here/config/config.toml" in refused.value.hint
    assert not (systemctl / ".config").exists()


def test_a_service_that_takes_the_place_of_another_says_so(systemctl: Path) -> None:
    assert "replaces" not in run("--", "--home", "first")
    assert "replaces" not in run("--", "--home", "first")
    told = run("--", "--home", "second")
    assert "it replaces the service that ran" in told and "--home first" in told
    assert "--home second\n" in run("--", "--home", "second-one"), "one command is the beginning of the other"


def test_printing_changes_nothing(systemctl: Path) -> None:
    told = json.loads(run("--print", "--json"))
    assert told["for"] == "user" and told["text"] == run("--print")
    assert not (systemctl / ".config").exists() and not (systemctl / "called").exists()


def test_settings_that_are_none_are_refused_before_anything_is_written(systemctl: Path) -> None:
    with pytest.raises(ConfigError, match=r"limits\.hours"):
        run("--", "--hours", "night")
    with pytest.raises(ConfigError, match=r"limits\.disk_gb"):
        run("--", "--max-disk", "-1")
    with pytest.raises(ConfigError, match=r"swarm\.name"):
        run("--", "--swarm", "Bad Name!")
    refused = CliRunner().invoke(app, ["service", "install", "--", "--houres", "22-7"])
    assert refused.exit_code == 2 and "houres" in refused.output
    with pytest.raises(ConfigError, match="no such system"):
        run("--for", "openrc")
    assert not (systemctl / ".config").exists()


def test_an_invitation_is_read_before_anything_is_written_and_every_start_reads_it(systemctl: Path) -> None:
    to_friends = "sn1:k6dmcmllbmRzkMQA"
    run("--", to_friends, "--home", str(systemctl / "home"))
    unit = systemctl / ".config" / "systemd" / "user" / "swarmnode.service"
    assert f'join "{to_friends}" --home' in unit.read_text()
    assert stat.S_IMODE(unit.stat().st_mode) == 0o600, "it may hold the key of a swarm"
    assert not (systemctl / "home").exists()
    with pytest.raises(NetworkError, match="the invitation is damaged"):
        run("--", "sn1:broken")
    with pytest.raises(NetworkError, match="to friends, not to others"):
        run("--", to_friends, "--swarm", "others")


def test_the_unit_of_a_system_is_only_printed(systemctl: Path) -> None:
    with pytest.raises(ConfigError, match="by hand"):
        run("--for", "system")


def test_a_systemctl_that_fails_or_is_missing_is_said(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemctl / "broken").touch()
    with pytest.raises(SwarmnodeError, match="daemon-reload: Failed to connect to bus"):
        run()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SwarmnodeError, match="there is no systemctl"):
        run()


def test_words_of_a_unit_are_no_more_than_words() -> None:
    odd = 'a "b" \\ 100% $HOME ${X}\n[Install]'
    assert unit_word(odd) == '"a \\"b\\" \\\\ 100%% $$HOME $${X}\\n[Install]"'
    assert unit_word("") == '""' and unit_word("--hours") == "--hours" and unit_word(";") == '";"'


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "swarmnode.service"
    unit.write_text(user_unit(("/bin/true", 'a "b" 100%'), "/tmp", 2.5))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "swarmnode.service" not in done.stderr, done.stderr
