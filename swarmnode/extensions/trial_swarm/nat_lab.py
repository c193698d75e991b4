"""Homes behind routers, as network namespaces on one machine: to try and to measure what crosses a NAT.

[Lab] -> public machines on one bridge, homes with a router each -> LabMachine.start -> a process in there

    with Lab() as lab:
        seed, home = lab.public(), lab.home(nat="cone")
        process = seed.start([sys.executable, "-m", "swarmnode", "seed"])

Every home has the same private addresses, as homes have. Routers masquerade and let nothing in that was not
asked for. Linux keeps the source port where it can, so that peers see one port of a machine whoever it talks
to ("cone"); with `fully-random` each connection has a port of its own ("symmetric"), which nobody can guess.
Nothing leaves the machine: the namespaces are connected with one another only.

Needs root, `ip` and `nft` (Debian's iproute2 and nftables); `why_not` says what is missing.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from swarmnode.errors import SwarmnodeError

Nat = Literal["cone", "symmetric"]

COMMAND_TIMEOUT_S = 20.0

STOP_GRACE_S = 20.0

INTERNET = "11.0.0"
"""Prefix of public machines' addresses. Not a range for documentation, since go-libp2p gives out no such
address."""

_labs = itertools.count()


class LabError(SwarmnodeError):
    """Raised if the lab cannot be built, or a machine of it cannot do as asked."""


@dataclass(frozen=True, slots=True)
class LabMachine:
    """One machine: a network namespace."""

    namespace: str
    address: str
    """Its IPv4 address; of a home's machine a private one."""
    link: str
    """The interface by which it is connected."""
    router: str = ""
    """Namespace of its home's router; empty: it is in no home."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that make it run here."""
        return "ip", "netns", "exec", self.namespace

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Starts a process here, with these `options` of Popen. The caller ends it."""
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        return subprocess.Popen([*self.prefix, *command], text=True, **options)

    def run(self, command: Sequence[str]) -> str:
        """Runs a short command here and returns what it printed. Raises LabError."""
        return _run([*self.prefix, *command])

    @contextmanager
    def unplugged(self) -> Generator[None, None, None]:
        """Cuts the machine off the network for the time of the block."""
        self.run(["ip", "link", "set", self.link, "down"])
        try:
            yield
        finally:
            self.run(["ip", "link", "set", self.link, "up"])
            if self.link != "wan":  # Public machines share one network and need no router.
                self.run(["ip", "route", "replace", "default", "via", _gateway(self.address)])


class Lab:
    """The internet, the homes on it and nothing else. `with Lab() as lab:` builds and removes it."""

    def __init__(self) -> None:
        self._name = f"sn{os.getpid()}x{next(_labs)}"
        self._exit = ExitStack()
        self._number = itertools.count(1)
        self._inet = f"{self._name}-net"

    def __enter__(self) -> Self:
        reason = why_not()
        if reason:
            raise LabError(
                f"homes cannot be built here: {reason}",
                hint="they need Linux, root, and the programs ip and nft (Debian's iproute2 and nftables)",
            )
        with ExitStack() as stack:
            self._exit = stack
            self._namespace(self._inet)
            _run(["ip", "-n", self._inet, "link", "add", "internet", "type", "bridge"])
            _run(["ip", "-n", self._inet, "link", "set", "internet", "up"])
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def public(self) -> LabMachine:
        """Adds a machine with a public address, which everybody can dial."""
        number = next(self._number)
        machine = LabMachine(self._namespace(f"{self._name}-p{number}"), f"{INTERNET}.{number}", "wan")
        self._plug(machine.namespace, "wan", machine.address)
        return machine

    def home(
        self,
        nat: Nat = "cone",
        *,
        double: bool = False,
        machines: int = 1,
        forward: int | None = None,
        loss: float = 0.0,
    ) -> list[LabMachine]:
        """Adds a home of `machines` machines behind one router, or behind two, the outer one the provider's.

        `forward`: a TCP port that the home's router forwards to its first machine. `loss`: the share of
        packets that it drops."""
        number = next(self._number)
        router = self._namespace(f"{self._name}-r{number}")
        if double:
            outer = self._namespace(f"{self._name}-o{number}")
            self._plug(outer, "wan", f"{INTERNET}.{number}")
            self._cable((outer, "lan", "100.64.0.1/24"), (router, "wan", "100.64.0.2/24"))
            _route(router, "100.64.0.1")
            self._masquerade(outer, nat)
        else:
            self._plug(router, "wan", f"{INTERNET}.{number}")
        self._bridge(router, "lan", "192.168.1.1/24")
        self._masquerade(router, nat, forward, loss)
        found: list[LabMachine] = []
        for place in range(machines):
            name = f"{self._name}-h{number}{chr(97 + place)}"
            inside = LabMachine(self._namespace(name), f"192.168.1.{20 + place}", "eth0", router)
            self._cable((inside.namespace, "eth0", f"{inside.address}/24"), (router, f"port{place}", None))
            _run(["ip", "-n", router, "link", "set", f"port{place}", "master", "lan"])
            _route(inside.namespace, "192.168.1.1")
            found.append(inside)
        return found

    def move(self, machine: LabMachine) -> str:
        """Gives the home of a machine, which is behind one router, another public address and returns it.
        Providers do so at night, without a word to anybody who is connected."""
        address = f"{INTERNET}.{next(self._number)}"
        _run(["ip", "-n", machine.router, "address", "flush", "dev", "wan"])
        _run(["ip", "-n", machine.router, "address", "add", f"{address}/24", "dev", "wan"])
        return address

    def _namespace(self, name: str) -> str:
        _run(["ip", "netns", "add", name])
        self._exit.callback(_run, ["ip", "netns", "delete", name])
        _run(["ip", "-n", name, "link", "set", "lo", "up"])
        return name

    def _plug(self, namespace: str, link: str, address: str) -> None:
        """Connects a namespace to the internet."""
        far = f"to{address.rpartition('.')[2]}"
        self._cable((namespace, link, f"{address}/24"), (self._inet, far, None))
        _run(["ip", "-n", self._inet, "link", "set", far, "master", "internet"])

    def _cable(self, *ends: tuple[str, str, str | None]) -> None:
        (one, one_link, _), (other, other_link, _) = ends
        _run(
            ["ip", "link", "add", one_link, "netns", one, "type", "veth", "peer", other_link, "netns", other]
        )
        for namespace, link, address in ends:
            if address is not None:
                _run(["ip", "-n", namespace, "address", "add", address, "dev", link])
            _run(["ip", "-n", namespace, "link", "set", link, "up"])

    def _bridge(self, namespace: str, link: str, address: str) -> None:
        _run(["ip", "-n", namespace, "link", "add", link, "type", "bridge"])
        _run(["ip", "-n", namespace, "address", "add", address, "dev", link])
        _run(["ip", "-n", namespace, "link", "set", link, "up"])

    def _masquerade(self, router: str, nat: Nat, forward: int | None = None, loss: float = 0.0) -> None:
        how = "masquerade fully-random" if nat == "symmetric" else "masquerade"
        lose = f"numgen random mod 1000 < {round(1000 * loss)} drop;" if loss else ""
        into = f'iifname "wan" tcp dport {forward} dnat to 192.168.1.20;' if forward else ""
        rules = f"""
            table ip home {{
                chain into {{ type nat hook prerouting priority dstnat; {into} }}
                chain out {{ type nat hook postrouting priority srcnat; oifname "wan" {how}; }}
                chain through {{
                    type filter hook forward priority filter; policy drop; {lose}
                    iifname "lan" accept; ct status dnat accept; ct state established,related accept;
                }}
                chain in {{
                    type filter hook input priority filter; policy accept;
                    iifname "wan" ct state new drop;
                }}
            }}
        """
        _run(["ip", "netns", "exec", router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"])
        _run(["ip", "netns", "exec", router, "nft", "-f", "-"], text=rules)


def stop(*processes: "subprocess.Popen[str]") -> None:
    """Ends what still runs of these processes: asks all first, and kills those that do not listen."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def why_not() -> str:
    """Returns the reason why no homes can be built on this machine; empty if they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [program for program in ("ip", "nft", "sysctl") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} missing (Debian's iproute2, nftables, procps)"
    name = f"sn{os.getpid()}try"
    try:
        _run(["ip", "netns", "add", name])
        try:
            _run(["ip", "netns", "exec", name, "nft", "add", "table", "ip", "try"])
        finally:
            _run(["ip", "netns", "delete", name])
    except LabError as error:
        return str(error)
    return ""


def _gateway(address: str) -> str:
    return f"{address.rpartition('.')[0]}.1"


def _route(namespace: str, gateway: str) -> None:
    _run(["ip", "-n", namespace, "route", "add", "default", "via", gateway])


def _run(command: Sequence[str], *, text: str = "") -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
