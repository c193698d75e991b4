"""What one policy has in a shared engine: its line, its rows, its versions, its mail. No engine, no threads.

shared.py -> [Member] -> outputs in the member's own version numbers
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from sys import maxsize

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import (
    BASE_VERSION,
    EngineStats,
    InFlight,
    Output,
    PolicyUpdate,
    Request,
    Sampled,
    merged,
)
from swarmnode.rollout.requests import RequestQueue, read_tokens, untouched
from swarmnode.types import Span

FIRST_SERIAL = 2**32
"""Far above any version number: a span that carries a serial never touches one that carries a version."""


@dataclass(frozen=True, slots=True)
class KnownPolicy:
    """A version of a member."""

    update: PolicyUpdate
    """The policy as the engine knows it: `update.version` is the serial. Kept, because the engine forgets
    it."""
    version: int
    """The version number that the member knows it by."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A request that the engine works on."""

    name: str
    """Its id there; never used twice."""
    request: Request
    """The request as the member submitted it, or as far as it was when it was put back."""
    serial: int

    @property
    def below(self) -> Request:
        """The request as the engine is asked."""
        return replace(self.request, request_id=self.name, version=self.serial)


class Member:
    """The bookkeeping of one member. Whoever calls has the shared engine's turn."""

    def __init__(self, name: str, max_length: int, base: PolicyUpdate, version: int) -> None:
        self.name = name
        self.rows: dict[str, MemberRow] = {}
        self.policies = {base.version: KnownPolicy(base, version)}
        """Policies by serial: the newest, and what somebody runs on or waits for."""
        self.newest = base.version
        self.asleep = False
        self.closed = False
        self.last_start = -1
        """Number of the row that it got last."""
        self.generation_s = 0.0
        """Time of all steps in which it had a row."""
        self.swap_s = 0.0
        # The engine itself looks at tokens; what is left to check here has nothing to do with a vocabulary.
        self._queue = RequestQueue(max_length, vocab=maxsize)
        self._named = {version: base.version}
        """Serials by version number; where a number was given twice, the later one."""
        self._mail: list[Output] = []
        self._error: BaseException | None = None
        self._swaps = 0
        self._prompt_tokens = 0
        self._reprefilled_tokens = 0
        self._kept_tokens = 0
        self._generated_tokens = 0

    # Requests

    @property
    def waiting(self) -> list[Request]:
        return self._queue.waiting

    @property
    def waits_for(self) -> int:
        """Rows it would take if they were free."""
        return len(self._queue)

    @property
    def followers(self) -> list[MemberRow]:
        """Rows that go along with a new policy."""
        return [row for row in self.rows.values() if row.request.version is None]

    @property
    def wants_a_step(self) -> bool:
        return not self._mail and self._error is None and bool(self.rows or len(self._queue))

    def check(self, request: Request) -> None:
        self._queue.check(request, self.live_versions)

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue.submit(requests, self.live_versions)
        self.asleep = False

    def start(self, count: int, numbers: Iterator[int]) -> list[MemberRow]:
        """The next requests in line get rows."""
        rows: list[MemberRow] = []
        for request in self._queue.take(count):
            self.last_start = next(numbers)
            name = f"{self.name}:{request.request_id}#{self.last_start}"
            row = self.rows[name] = MemberRow(name, request, self.serial_of(request.version))
            rows.append(row)
        return rows

    def left(self, row: MemberRow, output: Output) -> Output:
        """A row is gone from the engine. Returns its output as the member knows it."""
        del self.rows[row.name]
        self._generated_tokens += len(output.sampled) - len(row.request.sampled)
        first, again = read_tokens(row.request, output.kept_tokens)
        self._prompt_tokens += first
        self._reprefilled_tokens += again
        self._kept_tokens += output.kept_tokens
        return replace(output, request_id=row.request.request_id, sampled=self.translated(output.sampled))

    def post(self, output: Output) -> None:
        """An output that the next `take_mail` hands out."""
        self._mail.append(output)

    def put_back(self, rows: Sequence[MemberRow], outputs: Sequence[Output]) -> None:
        """Rows that were aborted wait before all others, to go on where they are."""
        again = [
            row.request.resumed(output.sampled)
            for row, output in zip(rows, outputs, strict=True)
            if output.finish == "abort"
        ]
        self._queue.put_first(again)
        for output in outputs:
            if output.finish != "abort":
                self.post(output)

    def withdraw(self, chosen: Collection[str] | None) -> list[Output]:
        """Take requests (all: None) out of the line."""
        return [untouched(request) for request in self._queue.withdraw(chosen)]

    def take_mail(self, chosen: Collection[str] | None = None) -> list[Output]:
        """What ended since the last time; raises what made everything in flight end instead."""
        if (error := self._error) is not None:
            self._error = None
            raise error
        mail, self._mail = self._mail, []
        taken = [output for output in mail if chosen is None or output.request_id in chosen]
        if len(taken) < len(mail):
            self._mail = [output for output in mail if output not in taken]
        self.release(taken)
        self.forget_unused()
        return taken

    def release(self, outputs: Iterable[Output]) -> None:
        """These are handed out: their ids may be used again."""
        for output in outputs:
            self._queue.close(output.request_id)

    def fail(self, error: BaseException | None) -> None:
        """Nothing is in flight any more. With an `error`, the next call for outputs raises it."""
        if self.rows or len(self._queue):
            self._error = error
        self._queue.withdraw(None)
        for row in self.rows.values():
            self._queue.close(row.request.request_id)
        self.rows.clear()
        self.forget_unused()

    # Versions

    @property
    def version(self) -> int:
        return self.policies[self.newest].version

    @property
    def live_versions(self) -> set[int]:
        return {known.version for known in self.policies.values()}

    def serial_of(self, version: int | None) -> int:
        """What a version is called in the engine. None: the newest."""
        if version is None:
            return self.newest
        if version == BASE_VERSION:
            return BASE_VERSION
        if (serial := self._named.get(version)) is None:
            live = ", ".join(map(str, sorted(self.live_versions)))
            raise EngineError(f"policy {version} is not live", hint=f"live are {live}")
        return serial

    def check_versions(self, new_version: int, inflight: InFlight, most: int) -> None:
        """Raises EngineError unless a new version can be had beside those that stay."""
        running = {
            row.serial for row in self.rows.values() if inflight == "pin" or row.request.version is not None
        }
        live = len((running | self._asked_for(new_version)) - {BASE_VERSION}) + 1
        if live > most:
            raise EngineError(
                f"{live} policy versions would be live, each policy of this shared engine has {most}",
                hint='let the oldest requests end first, or update with "recompute"',
            )

    def adopt(self, known: PolicyUpdate, version: int, seconds: float) -> None:
        """A new version, which the engine has just taken over."""
        self.policies[known.version] = KnownPolicy(known, version)
        self._named[version] = self.newest = known.version
        self._swaps += 1
        self.swap_s += seconds

    def forget_unused(self) -> None:
        used = {self.newest, *(row.serial for row in self.rows.values()), *self._asked_for(None)}
        self.policies = {serial: known for serial, known in self.policies.items() if serial in used}
        self._named = {version: serial for version, serial in self._named.items() if serial in used}

    def translated(self, sampled: Sampled) -> Sampled:
        """What was sampled, with the member's own version numbers."""
        spans = (
            Span(self.policies[span.version].version, span.start, span.end, span.kv)
            if span.version >= FIRST_SERIAL
            else span
            for span in sampled.spans
        )
        return replace(sampled, spans=merged(spans))

    def stats(self, kv_use: float | None) -> EngineStats:
        return EngineStats(
            running=len(self.rows),
            waiting=len(self._queue),
            prompt_tokens=self._prompt_tokens,
            reprefilled_tokens=self._reprefilled_tokens,
            kept_tokens=self._kept_tokens,
            generated_tokens=self._generated_tokens,
            generation_s=self.generation_s,
            live_versions=tuple(sorted(self.live_versions)),
            swaps=self._swaps,
            swap_s=self.swap_s,
            kv_use=kv_use,
        )

    def _asked_for(self, new_version: int | None) -> set[int]:
        """Serials that waiting requests will start on, `new_version` and the newest apart."""
        asked = {request.version for request in self._queue.waiting} - {None, BASE_VERSION, new_version}
        return {self._named[version] for version in asked if version in self._named}


def fair_shares(members: Iterable[Member], free: int) -> dict[Member, int]:
    """Free rows by member: one after the other to who has the fewest and still waits for one. Of equals to
    who has waited longest: with fewer rows than members, nobody would else come after the first."""
    shares = {member: 0 for member in members if member.waits_for}
    if free >= sum(member.waits_for for member in shares):
        return {member: member.waits_for for member in shares}
    for _ in range(min(free, sum(member.waits_for for member in shares))):
        unserved = (member for member in shares if member.waits_for > shares[member])
        shares[min(unserved, key=lambda one: (len(one.rows) + shares[one], one.last_start))] += 1
    return shares
