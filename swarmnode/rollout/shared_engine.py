"""One engine for several callers: policies in training, and guests that sample from what these have learnt.

PartialRollouts of policy 0 -> member 0 --+
PartialRollouts of policy 1 -> member 1 --+--> [SharedEngine] -> any engine
people, by extensions/serve/ -> guests  --+

Each member is an `Engine` of its own with its own version numbers. If the engine serves a single policy, that
policy leads it: its requests, updates and results are those of an engine of its own. With several policies,
the engine below uses *serials*, version numbers that are unique over all members, so that no member's update
moves another's requests. A guest has no policy: each of its requests stays on the version that it named, or
on the one that was newest when it arrived.

Each member is driven by a thread of its own. A call to `step` advances the rows of all members; members that
call meanwhile wait for that same step and take their own outputs from it. A failed step fails for all. Guests
are sent the results of every step, and step themselves only while nobody else does.

If training goes first, guests have a share of the engine's time: beyond that, none of their requests starts
and no guest steps. Training never waits for guests: if their rows hold more versions than fit beside a new
one, or the engine sleeps, the rows are put back and continue later where they stopped, under the same
version.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count, groupby
from queue import Empty, SimpleQueue

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import (
    BASE_VERSION,
    Capabilities,
    Engine,
    EngineStats,
    InFlight,
    Output,
    PolicyUpdate,
    Request,
    check_logprobs,
)
from swarmnode.rollout.fair_lock import FairLock
from swarmnode.rollout.member_state import FIRST_SERIAL, MemberRow, MemberState, fair_shares
from swarmnode.token_bucket import TokenBucket

MODES: frozenset[InFlight] = frozenset({"recompute"})
"""Modes of `set_policy` with several policies. Not "keep": a request that names its version stays on it, and
with several policies every request names one."""

GUEST_ROWS = 8
"""The most rows of all guests together."""
GUEST_VERSIONS = 2
"""The most versions, in addition to the newest ones, that rows of guests keep live."""
PEOPLE_FIRST = -1
"""Priority of guests' requests in the engine if people come first; otherwise they queue with the others."""
GUESTS_SHARE, GUESTS_AT_ONCE_S = 0.05, 2.0
"""Share of the time of an engine whose policies train that guests may take on average, and seconds at
once."""
STILL_TRAINS_S = 5.0
"""Seconds after a micro-batch or a policy's step during which the policies count as training."""
OUT_OF_TIME_S = 0.02
"""Seconds after which guests without time look again."""
REST_S = 1.0
"""The longest time that training rests for guests between two micro-batches."""
LOOK_AGAIN_S = 0.005
BETWEEN_STEPS_S = 0.002
"""Seconds within which a member that generates a round steps again."""
LOOKS = 100
"""The most waits of that length for somebody else's step."""

Progress = tuple[Sequence[Output], Sequence[Request]]
"""A guest's ended requests, and those in flight with their tokens so far."""


def versions_needed(members: int) -> int:
    """Returns the live versions that an engine needs: the newest of each of `members` members, and guests'.

    One more than they use: an update is loaded before the version that it replaces is released.

    >>> versions_needed(3)
    6
    """
    return members + 1 + GUEST_VERSIONS


class SharedEngine:
    """Shares one `Engine`, which nobody else may use, as one `Engine` per policy and one per guest.

    >>> shared = SharedEngine(EmbeddedEngine(model, eos, max_versions=5), members=2)    # doctest: +SKIP
    >>> first, second = shared.member("policy-0"), shared.member("policy-1")            # doctest: +SKIP
    >>> people = shared.guest("people", of="policy-0")                                  # doctest: +SKIP
    """

    def __init__(self, engine: Engine, members: int, *, people_first: bool = False) -> None:
        """`people_first`: guests' requests start before all others, and training rests while they are
        answered. Raises EngineError if the engine cannot keep a version live for each member."""
        limits, several = engine.capabilities, members > 1
        spare = limits.max_versions - members - several
        self.guest_versions = max(0, min(spare, GUEST_VERSIONS))
        """Number of versions that rows of guests may keep live in addition to the newest ones."""
        versions = (limits.max_versions - several - self.guest_versions) // members
        if several and versions < 1:
            raise EngineError(
                f"the {limits.name} engine holds {limits.max_versions} policy versions; "
                f"{members} policies on one engine need {members + 1} at least",
                hint="run each policy in a process of its own, or try another --engine",
            )
        modes = limits.inflight & MODES if several else limits.inflight
        self.capabilities = replace(limits, inflight=modes, max_versions=versions)
        self.steps = 0
        """Number of steps of the engine below, including failed ones."""
        self.engine = engine
        self.people_first = people_first
        self._expected = members
        self._members: dict[str, MemberState] = {}
        self._guests: dict[MemberState, SimpleQueue[Progress]] = {}
        """Results of steps that each guest has not read yet."""
        self._last_step: tuple[MemberState | None, float] = (None, float("-inf"))
        """The last member or guest that stepped, and the end of its step."""
        self._trained_s = float("-inf")
        """Time of the last policy's step or micro-batch."""
        self._time_of_guests = TokenBucket(GUESTS_SHARE, GUESTS_AT_ONCE_S)
        self.turns = FairLock()
        """Gives each call of a member the engine to itself."""
        self.serials = count(FIRST_SERIAL)
        self._numbers = count()
        self._rows: dict[str, MemberState] = {}
        """Owner of each request in the engine, by its id there."""

    @property
    def waiting(self) -> int:
        """Number of callers waiting for the engine."""
        return self.turns.waiting

    @property
    def rows(self) -> int:
        """Number of requests in the engine below."""
        return len(self._rows)

    @property
    def resting(self) -> bool:
        """True while all policies let the engine sleep: guests wait."""
        return self.all_are(lambda one: one.asleep or one.closed)

    def member(self, name: str) -> "SharedMember":
        """Returns the engine of one more policy, which starts on the base, version 0. All members must be
        made before any of them closes: the last one to close closes the engine."""
        if name in self._members or len(self._members) == self._expected:
            raise EngineError(f"no room for {name}: this engine is shared by {self._expected} policies")
        leads = self._expected == 1
        base = PolicyUpdate(0 if leads else next(self.serials), {}, 1.0)
        member = MemberState(name, self.capabilities.max_length, base, version=0, leads=leads)
        self._members[name] = member
        return SharedMember(self, member)

    def guest(self, name: str, of: str) -> "SharedGuest":
        """Returns an engine for one more guest, which samples from the versions of the policy `of` and from
        the base."""
        with self.turns:
            host, limits = self._members[of], self.capabilities
            known = host.policies[host.newest]
            state = MemberState(name, limits.max_length, known.update, known.version)
            self._guests[state] = progress = SimpleQueue()
        return SharedGuest(self, state, host, progress)

    def hold_at_most(self, rows: int, guest_versions: int) -> None:
        """Limits the rows of the policies' requests, and the versions that guests keep live, to what fits
        into the remaining memory."""
        self.capabilities = replace(self.capabilities, max_running=rows)
        self.guest_versions = min(self.guest_versions, guest_versions)

    def give_way(self) -> None:
        """Makes the training thread rest before a micro-batch, if people come first and wait for tokens."""
        self._trained_s = time.monotonic()
        if not self.people_first:
            return
        until_s = time.monotonic() + REST_S
        while not self.resting and any(map(_is_busy, self._guests)) and time.monotonic() < until_s:
            time.sleep(LOOK_AGAIN_S)

    # For members; the caller holds `turns`.

    def step(self, caller: MemberState) -> None:
        """Steps the engine once, after giving free rows to waiting requests."""
        started = time.perf_counter()
        try:
            with self.failing_for_all(caller):
                self._fill_rows()
                owners = list(self._rows.values())
                for output in self.engine.step():
                    check_logprobs(output, self.capabilities.name)
                    if (member := self._rows.pop(output.request_id, None)) is not None:
                        member.post(member.left(member.rows[output.request_id], output))
                for guest, progress in self._guests.items():
                    if guest.has_news:
                        progress.put((guest.take_outputs(), self.in_flight(guest)))
        finally:
            self.steps += 1
            ended_s = time.monotonic()
            self._last_step = (caller, ended_s)
            if caller not in self._guests:
                self._trained_s = ended_s
        took_s = time.perf_counter() - started
        if owners and self.training_is_first:
            of_guests = sum(member in self._guests for member in owners)
            self._time_of_guests.owe(took_s * of_guests / len(owners))

    @property
    def guests_have_time(self) -> bool:
        """False while training goes first and guests have used up their share."""
        return not self.training_is_first or self._time_of_guests.has(0.0, now=time.monotonic())

    @property
    def training_is_first(self) -> bool:
        """True while a policy trains or generates, unless people come first."""
        return not self.people_first and time.monotonic() < self._trained_s + STILL_TRAINS_S

    def is_stepped_by_another(self, member: MemberState) -> bool:
        """Returns True while somebody else steps or is about to, unless this member has an error to raise."""
        last, ended_s = self._last_step
        return not member.failed and (
            self.turns.taken or (last is not member and time.monotonic() < ended_s + BETWEEN_STEPS_S)
        )

    def in_flight(self, member: MemberState) -> tuple[Request, ...]:
        """Returns a member's requests in flight, with their tokens so far."""
        found = self.engine.snapshot(member.rows) if member.rows else ()
        below = {request.request_id: request.sampled for request in found}
        rows = [row for row in member.rows.values() if row.name in below]
        running = [row.request.resumed(member.translated(below[row.name])) for row in rows]
        return (*running, *member.waiting)

    def _fill_rows(self) -> None:
        policies = self._members.values()
        free = self.capabilities.max_running - len(self._rows)
        if self._expected == 1:  # The engine has its own queue, and computes prompts ahead for it.
            free = sum(member.waits_for for member in policies)
        for member, share in fair_shares(policies, free).items():
            # One version after another: a loaded version is unused, and may be forgotten, until its rows are
            # submitted.
            for serial, rows in groupby(member.start(share, self._numbers), lambda row: row.serial):
                self.load(member, serial)
                self._submit(member, list(rows), None)
        if not self.resting and self.guests_have_time:
            self._fill_rows_of_guests()

    def _fill_rows_of_guests(self) -> None:
        free = GUEST_ROWS - sum(len(guest.rows) for guest in self._guests)
        for guest, share in fair_shares(self._guests, free).items():
            for _ in range(share):
                if not self._has_room(guest.serial_of(guest.waiting[0].version)):
                    break
                [row] = guest.start(1, self._numbers)
                try:
                    self.load(guest, row.serial)
                    self._submit(guest, [row], PEOPLE_FIRST if self.people_first else 0)
                except (EngineError, RuntimeError, MemoryError) as error:
                    # The version that the guest asked for does not fit: that is nobody else's error.
                    self._send_away(guest, error)
                    break

    def _submit(self, member: MemberState, rows: Sequence[MemberRow], priority: int | None) -> None:
        self._rows |= {row.name: member for row in rows}
        try:
            self.engine.submit([row.below(priority) for row in rows])
        except EngineError:
            for row in rows:
                del self._rows[row.name]
            raise

    def _has_room(self, serial: int) -> bool:
        held = self._held_by_guests()
        return serial in (BASE_VERSION, *self._newest(), *held) or len(held) < self.guest_versions

    def _newest(self) -> set[int]:
        return {member.newest for member in self._members.values()}

    def _held_by_guests(self) -> list[int]:
        """Returns the versions, other than the newest ones, that rows of guests run on, oldest first."""
        used = {row.serial for guest in self._guests for row in guest.rows.values() if row.serial is not None}
        return sorted(used - self._newest() - {BASE_VERSION})

    def make_room(self, member: MemberState) -> None:
        """Puts back the rows of guests on the oldest versions if a new policy of this member would not fit
        beside them."""
        if not self.guest_versions:
            for guest in self._guests:
                self._send_away(guest, EngineError("the policy has moved on, and this engine holds only one"))
            return
        held = {*self._held_by_guests()}
        if any(row.serial == member.newest for guest in self._guests for row in guest.rows.values()):
            held.add(member.newest)
        for serial in sorted(held)[: max(0, len(held) - self.guest_versions)]:
            self._put_guests_back(lambda row, serial=serial: row.serial == serial)

    def _put_guests_back(self, choose: Callable[[MemberRow], bool]) -> None:
        for guest in self._guests:
            rows = [row for row in guest.rows.values() if choose(row)]
            guest.put_back(rows, self.take_back(guest, rows))

    def _send_away(self, guest: MemberState, error: Exception | None) -> None:
        if names := [name for name in guest.rows if name in self._rows]:
            with self.failing_for_all(guest):
                self.engine.abort(names)
            for name in names:
                del self._rows[name]
        guest.fail(error)

    def load(self, member: MemberState, serial: int | None) -> None:
        """Loads a version again before a request asks for it: the engine forgets versions that no request
        uses."""
        if serial not in (None, BASE_VERSION) and serial not in self.engine.stats().live_versions:
            started = time.perf_counter()
            update = member.policies[serial].update
            if member in self._guests:
                self.engine.load(update)
            else:  # The newest one stays, and no request follows it: each names its own.
                self.engine.set_policy(update, "keep")
            member.counters.swap_s += time.perf_counter() - started

    def take_back(self, member: MemberState, rows: Sequence[MemberRow]) -> list[Output]:
        """Takes rows out of the engine and returns their outputs so far, in the same order."""
        if not rows:
            return []
        with self.failing_for_all(member):
            found = {output.request_id: output for output in self.engine.abort([row.name for row in rows])}
            for output in found.values():
                check_logprobs(output, self.capabilities.name)
        return [self.leave(member, found[row.name]) for row in rows]

    def leave(self, member: MemberState, output: Output) -> Output:
        """Returns an output that left the engine in the member's terms."""
        del self._rows[output.request_id]
        return member.left(member.rows[output.request_id], output)

    def sleep(self) -> None:
        """Puts the engine to sleep if no policy is awake."""
        if self.resting:
            self._put_guests_back(lambda row: True)
            self.engine.sleep()

    def close(self) -> None:
        """Closes the engine once the last policy is closed."""
        if not self.all_are(lambda one: one.closed):
            return
        ended = EngineError(
            "the engine is closed: this node is stopping", hint="try again once it is running"
        )
        for guest in self._guests:
            guest.fail(ended)
            guest.closed = True
        self.engine.close()

    def remove(self, guest: MemberState) -> None:
        """Forgets a guest and all of its requests."""
        if not guest.closed:
            self._send_away(guest, None)
            del self._guests[guest]

    def check(self, member: MemberState, request: Request) -> None:
        """Refuses a request now if the engine would refuse it later. The member checks its own versions."""
        self.engine.check(replace(request, version=BASE_VERSION if request.version == BASE_VERSION else None))
        member.check(request)

    @contextmanager
    def failing_for_all(self, caller: MemberState) -> Iterator[None]:
        """Returns a context that reports an error to all members with requests in flight: to the caller now,
        to others in their next step."""
        try:
            yield
        except BaseException as error:
            self._rows.clear()
            for member in (*self._members.values(), *self._guests):
                member.fail(None if member is caller else error)
            # The engine still has the requests and would fail at every step. Aborting may fail as well.
            with suppress(Exception):
                self.engine.abort()
            raise

    def all_are(self, condition: Callable[[MemberState], bool]) -> bool:
        """Returns True if the condition holds for every policy."""
        return len(self._members) == self._expected and all(map(condition, self._members.values()))


class SharedMember:
    """The `Engine` of one member. Use it from one thread at a time, like any engine; members do not see each
    other."""

    def __init__(self, shared: SharedEngine, member: MemberState) -> None:
        self._shared = shared
        self._member = member

    @property
    def capabilities(self) -> Capabilities:
        return self._shared.capabilities

    @property
    def policy_version(self) -> int:
        return self._member.version

    def check(self, request: Request) -> None:
        with self._shared.turns:
            self._shared.check(self._member, request)

    def submit(self, requests: Iterable[Request]) -> None:
        with self._shared.turns:
            self._submit(list(requests))

    def step(self) -> Sequence[Output]:
        before = self._shared.steps
        with self._shared.turns:
            return self._step(before)

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        chosen = None if request_ids is None else set(request_ids)
        with self._shared.turns:
            return self._abort(chosen)

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        shared, member = self._shared, self._member
        with shared.turns:
            self._check_update(update, inflight)
            if member.leads:
                shared.make_room(member)
                shared.engine.set_policy(update, inflight)
                member.adopt(update, update.version)
                member.forget_unused()
                return
            known = replace(update, version=next(shared.serials))
            with member.counters.swap():
                shared.make_room(member)
                followers = member.followers
                # Adopted at once, although it may be forgotten before it is used: an update that does not fit
                # the model is refused here and not in the middle of a round.
                shared.engine.set_policy(known, "keep")
                member.put_back(followers, shared.take_back(member, followers))
            member.adopt(known, update.version)
            member.forget_unused()

    def _check_update(self, update: PolicyUpdate, inflight: InFlight) -> None:
        can = self.capabilities
        if self._member.followers and inflight not in can.inflight:
            raise EngineError(
                f"the {can.name} engine cannot {inflight} requests in flight",
                hint=f"it can {', '.join(sorted(can.inflight))} them",
            )
        self._member.check_versions(update.version, can.max_versions)

    def load(self, update: PolicyUpdate) -> None:
        raise EngineError(f"policy {update.version} is not live", hint="only a guest may ask for older ones")

    def stats(self) -> EngineStats:
        shared, member = self._shared, self._member
        with shared.turns:
            return member.stats(shared.engine.stats(), shared.rows - len(member.rows))

    def snapshot(self, request_ids: Iterable[str] | None = None) -> tuple[Request, ...]:
        chosen = None if request_ids is None else set(request_ids)
        with self._shared.turns:
            in_flight = self._snapshot()
        return tuple(one for one in in_flight if chosen is None or one.request_id in chosen)

    def sleep(self) -> Sequence[Output]:
        with self._shared.turns:
            outputs = self._abort(None)
            self._member.asleep = True
            self._shared.sleep()
            return outputs

    def close(self) -> None:
        member = self._member
        with self._shared.turns:
            if member.closed:
                return
            member.closed = True
            if not self._shared.all_are(lambda one: one.closed):
                self._shared.take_back(member, list(member.rows.values()))
            member.fail(None)
            self._shared.close()

    # The caller holds `turns`.

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._shared.check(self._member, request)
        self._member.submit(requests)

    def _step(self, before: int) -> Sequence[Output]:
        # While we waited for our turn, another member may have stepped: that step was ours as well.
        if self._member.wants_a_step and self._shared.steps == before:
            self._shared.step(self._member)
        return tuple(self._member.take_outputs())

    def _snapshot(self) -> tuple[Request, ...]:
        with self._shared.failing_for_all(self._member):
            return self._shared.in_flight(self._member)

    def _abort(self, chosen: set[str] | None) -> list[Output]:
        member = self._member
        ended = member.take_outputs(chosen)
        waiting = member.withdraw(chosen)
        rows = [r for r in member.rows.values() if chosen is None or r.request.request_id in chosen]
        outputs = self._shared.take_back(member, rows)
        member.release(outputs)
        member.forget_unused()
        return [*ended, *outputs, *waiting]


class SharedGuest(SharedMember):
    """The `Engine` of a guest: it samples from what a policy has learnt, and from the base. A request without
    a version stays on the one that is newest when it is submitted."""

    def __init__(
        self,
        shared: SharedEngine,
        member: MemberState,
        host: MemberState,
        progress: "SimpleQueue[Progress]",
    ) -> None:
        super().__init__(shared, member)
        self._host = host
        self._progress = progress

    @property
    def policy_version(self) -> int:
        return self._host.version

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that the guest may ask for in addition to the base, newest last."""
        with self._shared.turns:
            return tuple(self._host.recent)

    def ask(self, requests: Sequence[Request]) -> list[Request]:
        """Submits these requests in one turn, and returns them with the versions that will answer them.
        Raises EngineError for a version that is not kept."""

        def submitted() -> list[Request]:
            named = [self._named(request) for request in requests]
            self._submit(named)
            return named

        return self._shared.turns.do(submitted)

    def step(self) -> Sequence[Output]:
        return self.advance()[0]

    def advance(self) -> Progress:
        """Returns ended requests, and those in flight with their tokens so far. Steps once if nobody else
        does and guests have time."""
        before = self._shared.steps
        for _ in range(LOOKS):
            has_time = self._shared.guests_have_time or self._member.failed
            if has_time and self._progress.empty() and not self._shared.is_stepped_by_another(self._member):
                return self._stepped(before)
            with suppress(Empty):
                ended, in_flight = self._progress.get(timeout=BETWEEN_STEPS_S if has_time else OUT_OF_TIME_S)
                later, newest = self._sent()
                return (*ended, *later), in_flight if newest is None else newest
            if not has_time:
                break
        return (), ()

    def _stepped(self, before: int) -> Progress:
        with self._shared.turns:
            waits = self._shared.resting and not self._member.closed
            outputs = () if waits else self._step(before)
            ended, in_flight = self._sent()
            return (*ended, *outputs), self._snapshot() if in_flight is None else in_flight

    def _sent(self) -> tuple[list[Output], Sequence[Request] | None]:
        """Returns the outputs of steps since the last call, and the requests in flight after them. None:
        there was no step."""
        ended: list[Output] = []
        in_flight: Sequence[Request] | None = None
        while not self._progress.empty():
            outputs, in_flight = self._progress.get()
            ended += outputs
        return ended, in_flight

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> None:
        raise EngineError(
            "a guest has no policy of its own", hint="only the learner that trains a policy may update it"
        )

    def sleep(self) -> Sequence[Output]:
        return self.abort()

    def close(self) -> None:
        with self._shared.turns:
            self._shared.remove(self._member)
            self._member.closed = True

    def _submit(self, requests: Sequence[Request]) -> None:
        if self._member.closed:
            raise EngineError(
                "the engine is closed: this node is stopping", hint="try again once it is running"
            )
        super()._submit([self._named(request) for request in requests])

    def _named(self, request: Request) -> Request:
        recent, version = self._host.recent, request.version
        if version == BASE_VERSION:
            if not self._shared.guest_versions and self._host.policies[self._host.newest].update.tensors:
                raise EngineError("this engine holds one policy, without the base")
            return request
        policy = recent.get(self._host.version if version is None else version)
        if policy is None:
            raise EngineError(
                f"policy {version} is not available", hint=f"available: {', '.join(map(str, recent))}"
            )
        self._member.know(policy)
        return replace(request, version=policy.version)


def _is_busy(guest: MemberState) -> bool:
    return bool(guest.rows or guest.waits_for)
