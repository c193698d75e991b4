"""Homes behind routers, in network namespaces; skipped where they cannot be had, with the reason."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swarmnode.extensions.private_swarms.swarm_record import SwarmRecord, save
from swarmnode.extensions.trial_swarm.nat_lab import Lab, LabMachine, stop, why_not
from swarmnode.machine.storage import resolve_paths
from swarmnode.network.admission import file_of

PATIENCE_S = 90.0
MEMBER = Path(__file__).parent / "member.py"
BAD_HOLDER = Path(__file__).parent / "bad_holder.py"
CALLER = Path(__file__).parent / "caller.py"
NAT_PMP = Path(__file__).parent / "nat_pmp.py"
SLOW_LINE = Path(__file__).parent / "slow_line.py"


@dataclass
class Running:
    """A process in the lab, and the last line that it said."""

    process: "subprocess.Popen[str]"
    address: str = ""
    last: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def peer(self) -> str:
        return self.last.get("peer", "")

    def has_from(self, other: "Running") -> int:
        """Groups that it took in of another member."""
        return self.last.get("authors", {}).get(other.peer, 0)


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come true in time"
        time.sleep(0.1)


def end(process: "subprocess.Popen[str]", reader: threading.Thread) -> None:
    stop(process)
    reader.join()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture(scope="session")
def _homes_can_be_had() -> None:
    if reason := why_not():
        pytest.skip(f"no homes: {reason}")


@pytest.fixture
def lab(_homes_can_be_had: None) -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture
def beside(lab: Lab) -> Iterator[Callable[..., None]]:
    """Run a script of the lab itself on a machine, such as a router's, until the test ends."""
    with ExitStack() as stack:

        def run(machine: LabMachine, script: Path, *words: str) -> None:
            process = machine.start([sys.executable, "-u", str(script), *words], stdout=subprocess.PIPE)
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            stack.callback(stop, process)
            process.stdout.readline()

        yield run


@pytest.fixture
def start(lab: Lab, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a seed, a member or a bad holder on a machine of the lab; all of them end with the test."""
    numbers = iter(range(100))
    with ExitStack() as stack:

        def run(
            machine: LabMachine,
            *addresses: str,
            seed: bool = False,
            bad: str = "",
            caller: str = "",
            record: SwarmRecord | None = None,
            **more: str,
        ) -> Running:
            folder = tmp_path / f"{next(numbers)}"
            folder.mkdir()
            command = [sys.executable, "-m", "swarmnode", "seed", "--home", str(folder), *addresses]
            if seed and record is not None:
                save(record, file_of(resolve_paths(folder).swarms, record.name))
                command += ["--swarm", record.name]
            elif record is not None:
                more = {**more, "MEMBER_RECORD": str(file_of(folder, record.name))}
                save(record, Path(more["MEMBER_RECORD"]))
            if not seed:
                command = [sys.executable, str(MEMBER), str(folder), "4001", *addresses]
            if bad:
                command = [sys.executable, str(BAD_HOLDER), str(folder), "4001", bad, *addresses]
            if caller:
                command = [sys.executable, str(CALLER), str(folder), caller, *addresses]
            errors = stack.enter_context((folder / "errors").open("w"))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
            process = machine.start(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
            running = Running(process)

            def read() -> None:
                assert process.stdout is not None
                for line in process.stdout:
                    if seed:
                        running.address = line.strip()
                    elif "addresses" in (said := json.loads(line)):
                        known = said["addresses"]
                        relayed = (address for address in known if "/p2p-circuit" in address)
                        running.address = next(relayed, "") or next(a for a in known if machine.address in a)
                    else:
                        running.last = said

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            stack.callback(end, process, reader)
            until(
                lambda: bool(running.address) and (seed or caller in ("serve", "watch") or bool(running.last))
            )
            return running

        yield run
