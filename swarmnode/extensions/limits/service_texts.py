"""The text that has a user's systemd start a node.

service_command.py -> [user_unit] -> ~/.config/systemd/user/swarmnode.service | stdout
"""

import re
from collections.abc import Sequence


def user_unit(command: Sequence[str], folder: str, memory_gb: float | None) -> str:
    """Returns a unit for `systemctl --user` that runs a command. `folder`: its working folder, which relative
    paths of the command are of. `memory_gb`: most GiB of the machine's memory; None: no limit."""
    memory = "" if memory_gb is None else f"MemoryMax={round(memory_gb * 2**30)}\n"
    return (
        f"[Unit]\n{DESCRIPTION}{ATTEMPTS}\n[Service]\nType=exec\n"
        f"ExecStart={' '.join(map(unit_word, command))}\n"
        f"WorkingDirectory={folder.replace('%', '%%')}\n"
        f"Environment=OMP_NUM_THREADS=1\n{POLICY}UMask=0077\nLimitNOFILE=65536\nNoNewPrivileges=yes\n{memory}"
        "\n[Install]\nWantedBy=default.target\n"
    )


def unit_word(word: str) -> str:
    """Returns a word of a command as a unit has it.

    >>> print(unit_word("join"), unit_word('a "b" 100% $HOME'))
    join "a \\"b\\" 100%% $$HOME"
    """
    if re.fullmatch(r"[A-Za-z0-9./_-]+", word):
        return word
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$"), ("\n", "\\n")):
        word = word.replace(plain, escaped)
    return f'"{word}"'


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
