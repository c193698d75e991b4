"""One caller's part of a shared engine: its queue, rows, versions and outputs. Uses no engine and no
threads."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from sys import maxsize

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import (
    BASE_VERSION,
    EngineStats,
    Output,
    PolicyUpdate,
    Request,
    Sampled,
    merged,
)
from swarmnode.rollout.engine_counters import EngineCounters
from swarmnode.rollout.request_queue import RequestQueue, untouched
from swarmnode.types import Span

FIRST_SERIAL = 2**32
"""Lowest serial, far above any version number: a span with a serial never touches one with a version."""

RECENT_VERSIONS = 4
"""Number of recent versions of a policy that guests may ask for, each an adapter."""


@dataclass(frozen=True, slots=True)
class KnownPolicy:
    """A version of a member's policy."""

    update: PolicyUpdate
    """The policy as the engine knows it: `update.version` is the serial. Kept because the engine forgets
    it."""
    version: int
    """The member's own version number."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member's request in the engine."""

    name: str
    """Request id in the engine; never used twice."""
    request: Request
    """The request as the member submitted it or, if it was put back, with the tokens so far."""
    serial: int | None
    """Serial of the version it samples from. None: the engine's newest policy, through every update."""

    def below(self, priority: int | None) -> Request:
        """Returns the request in the engine's terms. `priority` None: the request's own."""
        known = replace(self.request, request_id=self.name, version=self.serial)
        return known if priority is None else replace(known, priority=priority)


class MemberState:
    """The bookkeeping of one member. The caller holds the shared engine's lock."""

    def __init__(
        self,
        name: str,
        max_length: int,
        base: PolicyUpdate,
        version: int,
        *,
        leads: bool = False,
    ) -> None:
        """`leads`: the engine's newest policy is this member's, and its version numbers are the engine's."""
        self.name = name
        self.leads = leads
        self.rows: dict[str, MemberRow] = {}
        self.policies = {base.version: KnownPolicy(base, version)}
        """Policies by serial: the newest, and those that requests run on or wait for."""
        self.newest = base.version
        self.recent = {version: self.policies[base.version]}
        """The member's latest policies, by version number, for guests to ask for."""
        self.asleep = False
        self.closed = False
        self.last_start = -1
        """Number of the row it got most recently."""
        self.counters = EngineCounters()
        # The engine checks tokens itself; the checks here do not depend on a vocabulary.
        self._queue = RequestQueue(max_length, vocab=maxsize)
        self._named = {version: base.version}
        """Serials by version number; if a number was used twice, the later one."""
        self._outputs: list[Output] = []
        self._error: BaseException | None = None

    # Requests

    @property
    def waiting(self) -> list[Request]:
        return self._queue.waiting

    @property
    def waits_for(self) -> int:
        """Number of rows it would take if they were free."""
        return len(self._queue)

    @property
    def followers(self) -> list[MemberRow]:
        """Rows that move to a new policy."""
        return [row for row in self.rows.values() if row.request.version is None]

    @property
    def wants_a_step(self) -> bool:
        return not self._outputs and self._error is None and bool(self.rows or len(self._queue))

    @property
    def has_news(self) -> bool:
        """True if it has rows or outputs, and no error."""
        return not self.failed and bool(self.rows or self._outputs)

    @property
    def failed(self) -> bool:
        """True until the next `take_outputs` raises a pending error."""
        return self._error is not None

    def check(self, request: Request) -> None:
        self._queue.check(request, self.live_versions)

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue.submit(requests, self.live_versions)
        self.asleep = False

    def start(self, count: int, numbers: Iterator[int]) -> list[MemberRow]:
        """Assigns rows to the next requests in the queue."""
        rows: list[MemberRow] = []
        for request in self._queue.take(count):
            self.last_start = next(numbers)
            name = f"{self.name}:{request.request_id}#{self.last_start}"
            follows = self.leads and request.version is None
            serial = None if follows else self.serial_of(request.version)
            row = self.rows[name] = MemberRow(name, request, serial)
            rows.append(row)
        return rows

    def left(self, row: MemberRow, output: Output) -> Output:
        """Removes a row that left the engine. Returns its output in the member's terms."""
        del self.rows[row.name]
        self.counters.started(row.request, output.kept_tokens)
        self.counters.generated_tokens += len(output.sampled) - len(row.request.sampled)
        return replace(output, request_id=row.request.request_id, sampled=self.translated(output.sampled))

    def post(self, output: Output) -> None:
        """Keeps an output for the next `take_outputs`."""
        self._outputs.append(output)

    def put_back(self, rows: Sequence[MemberRow], outputs: Sequence[Output]) -> None:
        """Queues aborted rows before all others, to continue where they stopped."""
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
        """Takes requests (None: all) out of the queue."""
        return [untouched(request) for request in self._queue.withdraw(chosen)]

    def take_outputs(self, chosen: Collection[str] | None = None) -> list[Output]:
        """Returns the outputs since the last call, or raises the error that ended everything in flight."""
        if (error := self._error) is not None:
            self._error = None
            raise error
        outputs, self._outputs = self._outputs, []
        taken = [output for output in outputs if chosen is None or output.request_id in chosen]
        if len(taken) < len(outputs):
            self._outputs = [output for output in outputs if output not in taken]
        self.release(taken)
        self.forget_unused()
        return taken

    def release(self, outputs: Iterable[Output]) -> None:
        """Frees the request ids of these outputs, which are handed out."""
        for output in outputs:
            self._queue.close(output.request_id)

    def fail(self, error: BaseException | None) -> None:
        """Ends everything in flight. With an `error`, the next call for outputs raises it."""
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
        """Returns the engine's serial for a version. None: the newest."""
        if version is None:
            return self.newest
        if version == BASE_VERSION:
            return BASE_VERSION
        if (serial := self._named.get(version)) is None:
            live = ", ".join(map(str, sorted(self.live_versions)))
            raise EngineError(f"policy {version} is not live", hint=f"live are {live}")
        return serial

    def check_versions(self, new_version: int, most: int) -> None:
        """Raises EngineError unless a new version fits beside those that stay."""
        running = {row.serial for row in self.rows.values() if row.request.version is not None}
        live = len((running | self._asked_for(new_version)) - {BASE_VERSION}) + 1
        if live > most:
            raise EngineError(
                f"{live} policy versions would be live; each policy of this shared engine may have {most}",
                hint="let the oldest requests finish first",
            )

    def adopt(self, known: PolicyUpdate, version: int) -> None:
        """Adds a new version, which the engine has just adopted."""
        policy = KnownPolicy(known, version)
        self.know(policy)
        self.newest = known.version
        self.recent = {**{v: one for v, one in self.recent.items() if v != version}, version: policy}
        for older in list(self.recent)[:-RECENT_VERSIONS]:
            del self.recent[older]

    def know(self, policy: KnownPolicy) -> None:
        """Adds a version that requests may ask for."""
        self.policies[policy.update.version] = policy
        self._named[policy.version] = policy.update.version

    def forget_unused(self) -> None:
        used = {self.newest, *(row.serial for row in self.rows.values()), *self._asked_for(None)}
        self.policies = {serial: known for serial, known in self.policies.items() if serial in used}
        self._named = {version: serial for version, serial in self._named.items() if serial in used}

    def translated(self, sampled: Sampled) -> Sampled:
        """Returns sampled tokens with the member's own version numbers."""
        spans = (
            Span(self.policies[span.version].version, span.start, span.end, span.kv)
            if span.version >= FIRST_SERIAL
            else span
            for span in sampled.spans
        )
        return replace(sampled, spans=merged(spans))

    def stats(self, below: EngineStats, others: int) -> EngineStats:
        """Returns the member's part of the engine's stats; `others` is the number of other members'
        requests."""
        if not self.leads:
            return self.counters.stats(len(self.rows), len(self._queue), self.live_versions, below.kv_use)
        return replace(
            below,
            running=max(0, below.running - others),
            waiting=below.waiting + len(self._queue),
            live_versions=tuple(sorted(self.live_versions)),
        )

    def _asked_for(self, new_version: int | None) -> set[int]:
        """Returns the serials that waiting requests will start on, except `new_version` and the newest."""
        asked = {request.version for request in self._queue.waiting} - {None, BASE_VERSION, new_version}
        return {self._named[version] for version in asked if version in self._named}


def fair_shares(members: Iterable[MemberState], free: int) -> dict[MemberState, int]:
    """Returns the number of free rows for each member.

    Each free row goes to the member with the fewest rows that still waits for one; among equals, to the one
    that has waited longest, because with fewer rows than members only the first would ever get any."""
    shares = {member: 0 for member in members if member.waits_for}
    if free >= sum(member.waits_for for member in shares):
        return {member: member.waits_for for member in shares}
    for _ in range(min(free, sum(member.waits_for for member in shares))):
        unserved = (member for member in shares if member.waits_for > shares[member])
        first = min(unserved, key=lambda one: (len(one.rows) + shares[one], one.last_start))
        shares[first] += 1
    return shares
