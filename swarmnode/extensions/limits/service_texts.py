"""The texts that have a system start a node: units of systemd, an agent of launchd, a task of Windows.

service_command.py -> [TEXTS] -> ~/.config/systemd/user/swarmnode.service | stdout
                              -> docker/swarmnode.service, the text of `system` (a test compares them)
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


def system_unit(started: Started) -> str:
    """Returns a unit for a machine's administrator: a user of its own, and what it may not do."""
    return (
        f"{SYSTEM_HEAD}[Unit]\n{DESCRIPTION}{NETWORK}{ATTEMPTS}\n[Service]\nType=exec\n"
        f"ExecStart={' '.join(map(unit_word, started.command))}\n{POLICY}\n{HARDENED}"
        "\n[Install]\nWantedBy=multi-user.target\n"
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
    "system": system_unit,
    "launchd": launch_agent,
    "windows": windows_task,
}
"""By the word that `swarmnode service install --for` takes."""

DESCRIPTION = "Description=swarmnode, a member of a reinforcement-learning swarm\n"

NETWORK = """\
Documentation=file:///usr/share/doc/swarmnode/README.md
Wants=network-online.target
After=network-online.target
"""

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

SYSTEM_HEAD = """\
# A node as a system service. Install swarmnode for it, then this file:
#   python3 -m venv /opt/swarmnode && /opt/swarmnode/bin/pip install '.[train]'   # in a clone
#   cp docker/swarmnode.service /etc/systemd/system/ && systemctl enable --now swarmnode
# Peers and settings: `systemctl edit swarmnode`, [Service] Environment=SWARMNODE_NETWORK__SEEDS=...
# How it is doing: SWARMNODE_HOME=/var/lib/swarmnode /opt/swarmnode/bin/swarmnode status (as root)
"""

HARDENED = """\
# A user of its own that owns nothing but the state folder, where everything is written.
DynamicUser=yes
User=swarmnode
StateDirectory=swarmnode
StateDirectoryMode=0700
WorkingDirectory=%S/swarmnode
Environment=SWARMNODE_HOME=%S/swarmnode HOME=%S/swarmnode XDG_CACHE_HOME=%S/swarmnode/cache
Environment=SWARMNODE_NETWORK__PORT=4001 OMP_NUM_THREADS=1
UMask=0077
LimitNOFILE=65536

NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectProc=invisible
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
# Left out on purpose:
#   MemoryDenyWriteExecute  torch's CPU kernels (oneDNN) write code and run it
#   NoExecPaths             our C kernels are compiled into the state folder and loaded from there
#   PrivateDevices, ProtectClock   they hide /dev/nvidia* (ProtectClock by a rule that allows one device only)
#   ProcSubset=pid          free memory is read from /proc/meminfo
"""
