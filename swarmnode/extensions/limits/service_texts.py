"""The texts that have a system start a node: a unit of systemd, an agent of launchd, a task of Windows.

service_command.py -> [TEXTS] -> ~/.config/systemd/user/swarmnode.service | stdout
"""

import plistlib
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape


@dataclass(frozen=True, slots=True)
class Started:
    """The command that is to run, and where."""

    command: tuple[str, ...]
    folder: str
    """Working folder, which relative paths of the command are of."""
    memory_gb: float | None = None
    """Most GiB of the machine's memory. None: no limit."""


def user_unit(started: Started) -> str:
    """Returns a unit for `systemctl --user`."""
    memory = "" if started.memory_gb is None else f"MemoryMax={round(started.memory_gb * 2**30)}\n"
    return (
        f"[Unit]\n{DESCRIPTION}{ATTEMPTS}\n[Service]\nType=exec\n"
        f"ExecStart={' '.join(map(unit_word, started.command))}\n"
        f"WorkingDirectory={started.folder.replace('%', '%%')}\n"
        f"Environment=OMP_NUM_THREADS=1\n{POLICY}UMask=0077\nLimitNOFILE=65536\nNoNewPrivileges=yes\n{memory}"
        "\n[Install]\nWantedBy=default.target\n"
    )


def launch_agent(started: Started) -> str:
    """Returns a property list for ~/Library/LaunchAgents."""
    return plistlib.dumps(
        {
            "Label": "swarmnode",
            "ProgramArguments": list(started.command),
            "WorkingDirectory": started.folder,
            "EnvironmentVariables": {"OMP_NUM_THREADS": "1"},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 60,
            "ExitTimeOut": 60,
            "ProcessType": "Background",
        }
    ).decode()


def windows_task(started: Started) -> str:
    """Returns a task for Windows' scheduler that starts a node in WSL2 when its user logs on."""
    words = escape(subprocess.list2cmdline(("--cd", started.folder, "--exec", *started.command)))
    return (
        '<?xml version="1.0" encoding="UTF-16"?>\n'
        '<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">\n'
        "  <Triggers><LogonTrigger><Enabled>true</Enabled></LogonTrigger></Triggers>\n"
        "  <Settings>\n"
        "    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>\n"
        "    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>\n"
        "    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>\n"
        "  </Settings>\n"
        f"  <Actions><Exec><Command>wsl.exe</Command><Arguments>{words}</Arguments></Exec></Actions>\n"
        "</Task>\n"
    )


def unit_word(word: str) -> str:
    """Returns a word of a command as a unit has it.

    >>> print(unit_word("join"), unit_word('a "b" 100% $HOME'))
    join "a \\"b\\" 100%% $$HOME"
    """
    if (
        word.replace("-", "a").replace("/", "a").replace(".", "a").replace("_", "a").isalnum()
        and word.isascii()
    ):
        return word
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$"), ("\n", "\\n")):
        word = word.replace(plain, escaped)
    return f'"{word}"'


TEXTS: Mapping[str, Callable[[Started], str]] = {
    "user": user_unit,
    "launchd": launch_agent,
    "windows": windows_task,
}
"""By the word that `swarmnode service install --for` takes."""

DESCRIPTION = "Description=swarmnode, a member of a reinforcement-learning swarm\n"

ATTEMPTS = """\
StartLimitIntervalSec=600
StartLimitBurst=5
"""

POLICY = """\
# SIGTERM to swarmnode alone: it writes a checkpoint and takes its children down; what is left is killed.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec=60
Restart=on-failure
RestartSec=10
# Stopped before it was up: there was no round to keep.
SuccessExitStatus=130
# A mistyped setting (2), a wrong identity (4), no such task or model (6, 7): trying again helps nobody.
RestartPreventExitStatus=2 4 6 7
"""
