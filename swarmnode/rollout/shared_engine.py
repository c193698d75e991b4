"""One engine for several policies: the rows of all of them are in one decode batch.

PartialRollouts of policy 0 -> member 0 --+
                                          +--> [SharedEngine] -> any engine that keeps several versions live
PartialRollouts of policy 1 -> member 1 --+

Each member is an `Engine` of its own with its own version numbers. Below, every request names its version by
a *serial* that is unique over all members, so that nobody's update moves anybody else's requests.

Each member is driven by a thread of its own. Whoever calls `step` advances the rows of all; those who call
meanwhile wait for that same step and take what it finished of theirs. A step that fails, fails for all.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, groupby

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
)
from swarmnode.rollout.fair_lock import FairLock
from swarmnode.rollout.member_state import FIRST_SERIAL, MemberRow, MemberState, fair_shares
from swarmnode.rollout.request_queue import with_live_version

MODES: frozenset[InFlight] = frozenset({"pin", "recompute", "abort"})
"""Modes of an update. Not "keep": a request that names its version stays on it, and here every request names
one."""


def versions_needed(members: int) -> int:
    """Returns the live versions that an engine needs for `members` members which may each pin one beside its
    newest.

    One more than they use: an update is loaded before the version it replaces is released.

    >>> versions_needed(3)
    7
    """
    return 2 * members + 1


class SharedEngine:
    """Gives out one `Engine` per policy over a single one, which nobody else may use.

    >>> shared = SharedEngine(EmbeddedEngine(model, eos, max_versions=5), members=2)    # doctest: +SKIP
    >>> first, second = shared.member("policy-0"), shared.member("policy-1")            # doctest: +SKIP
    """

    def __init__(self, engine: Engine, members: int) -> None:
        """Raises EngineError if the engine cannot keep a version live for each member."""
        limits = engine.capabilities
        versions = (limits.max_versions - 1) // members
        if "pin" not in limits.inflight or versions < 1:
            raise EngineError(
                f"the {limits.name} engine keeps {limits.max_versions} policy versions live, "
                f"{members} policies on one engine need {members + 1} at least",
                hint="run each policy in a process of its own, or try another --engine",
            )
        self.capabilities = replace(
            limits,
            name=f"shared {limits.name}",
            inflight=limits.inflight & (MODES if versions > 1 else MODES - {"pin"}),
            max_versions=versions,
        )
        self.steps = 0
        """Steps of the engine below, failed ones included."""
        self.engine = engine
        self._expected = members
        self._members: dict[str, MemberState] = {}
        self.turns = FairLock()
        """Each call of a member has the engine to itself."""
        self.serials = count(FIRST_SERIAL)
        self._numbers = count()
        self._rows: dict[str, MemberState] = {}
        """Whose is what the engine works on, by its id there."""

    @property
    def waiting(self) -> int:
        """Number of callers that wait for the engine."""
        return self.turns.waiting

    def member(self, name: str) -> "SharedMember":
        """Returns the engine of one more policy, which starts on the base, version 0. All members must be
        made before any of them closes: the last one that closes, closes the engine."""
        if name in self._members or len(self._members) == self._expected:
            raise EngineError(f"no place for {name}: this engine is shared by {self._expected} policies")
        base = PolicyUpdate(next(self.serials), {}, 1.0)
        member = self._members[name] = MemberState(name, self.capabilities.max_length, base, version=0)
        return SharedMember(self, member)

    # What members ask for; the caller holds `turns`.

    def step(self, caller: MemberState) -> None:
        """Steps the engine once, after waiting requests took the free rows."""
        started = time.perf_counter()
        with self._failing_for_all(caller):
            self._fill_rows()
            busy = set(self._rows.values())
            for output in self.engine.step():
                if (member := self._rows.pop(output.request_id, None)) is not None:
                    member.post(member.left(member.rows[output.request_id], output))
        for member in busy:
            member.counters.generation_s += time.perf_counter() - started

    def _fill_rows(self) -> None:
        free = self.capabilities.max_running - len(self._rows)
        for member, share in fair_shares(self._members.values(), free).items():
            # One version after the other: nothing asks for one that is loaded until its rows are submitted.
            for serial, rows in groupby(member.start(share, self._numbers), lambda row: row.serial):
                self.load(member, serial)
                started = [row.below for row in rows]
                self._rows |= {request.request_id: member for request in started}
                self.engine.submit(started)

    def load(self, member: MemberState, serial: int) -> None:
        """Loads a version again before a request asks for it: the engine forgets versions that no request
        uses."""
        if serial != BASE_VERSION and serial not in self.engine.stats().live_versions:
            started = time.perf_counter()
            self.engine.set_policy(member.policies[serial].update, "keep")
            member.counters.swap_s += time.perf_counter() - started

    def take_back(self, member: MemberState, rows: Sequence[MemberRow]) -> list[Output]:
        """Takes rows out of the engine, with their tokens so far, in this order."""
        if not rows:
            return []
        found = {output.request_id: output for output in self.engine.abort([row.name for row in rows])}
        for row in rows:
            del self._rows[row.name]
        return [member.left(row, found[row.name]) for row in rows]

    def check(self, request: Request) -> None:
        """Lets the engine refuse now the requests that it would refuse at their turn. The member checks its
        own versions."""
        self.engine.check(replace(request, version=BASE_VERSION if request.version == BASE_VERSION else None))

    @contextmanager
    def _failing_for_all(self, caller: MemberState) -> Iterator[None]:
        """Context that tells all members with requests in flight of an error: the caller now, others in their
        next step."""
        try:
            yield
        except BaseException as error:
            self._rows.clear()
            for member in self._members.values():
                member.fail(None if member is caller else error)
            raise
        finally:
            self.steps += 1

    def all_are(self, condition: Callable[[MemberState], bool]) -> bool:
        return len(self._members) == self._expected and all(map(condition, self._members.values()))


class SharedMember:
    """The `Engine` of one member. One thread at a time, as with any engine; members do not see each other."""

    def __init__(self, shared: SharedEngine, member: MemberState) -> None:
        self.capabilities: Capabilities = shared.capabilities
        self._shared = shared
        self._member = member

    @property
    def policy_version(self) -> int:
        return self._member.version

    def check(self, request: Request) -> None:
        with self._shared.turns:
            self._shared.check(request)
            self._member.check(request)

    def submit(self, requests: Iterable[Request]) -> None:
        accepted = list(requests)
        with self._shared.turns:
            for request in accepted:
                self._shared.check(request)
            self._member.submit(accepted)

    def step(self) -> Sequence[Output]:
        before = self._shared.steps
        with self._shared.turns:
            # Waiting for our turn we may have waited for somebody's step: it was ours as well.
            if self._member.wants_a_step and self._shared.steps == before:
                self._shared.step(self._member)
            return tuple(self._member.take_outputs())

    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        chosen = None if request_ids is None else set(request_ids)
        with self._shared.turns:
            return self._abort(chosen)

    def set_policy(self, update: PolicyUpdate, inflight: InFlight = "keep") -> Sequence[Output]:
        shared, member, can = self._shared, self._member, self.capabilities
        with shared.turns:
            followers = member.followers
            if followers and inflight not in can.inflight:
                raise EngineError(
                    f"the {can.name} engine cannot {inflight} requests in flight",
                    hint=f"it can {', '.join(sorted(can.inflight))} them",
                )
            member.check_versions(update.version, inflight, can.max_versions)
            known = replace(update, version=next(shared.serials))
            outputs: list[Output] = []
            with member.counters.swap():
                # At once, although it may be forgotten before it is used: an update that does not fit the
                # model is refused here and not in the middle of a round.
                shared.engine.set_policy(known, "keep")
                if inflight == "abort":
                    outputs = shared.take_back(member, followers)
                    member.release(outputs)
                elif inflight == "recompute":
                    member.put_back(followers, shared.take_back(member, followers))
            member.adopt(known, update.version)
            member.forget_unused()
            return outputs

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], version: int | None = None
    ) -> list[tuple[float, ...]]:
        with self._shared.turns:
            serial = self._member.serial_of(version)
            self._shared.load(self._member, serial)
            return self._shared.engine.score(sequences, serial)

    def stats(self) -> EngineStats:
        with self._shared.turns:
            return self._member.stats(self._shared.engine.stats().kv_use)

    def snapshot(self) -> tuple[Request, ...]:
        member = self._member
        with self._shared.turns:
            below = {request.request_id: request.sampled for request in self._shared.engine.snapshot()}
            rows = [row for row in member.rows.values() if row.name in below]
            running = [row.request.resumed(member.translated(below[row.name])) for row in rows]
            return (*running, *member.waiting)

    def restore(self, snapshot: Iterable[Request]) -> None:
        live = self._member.live_versions
        self.submit([with_live_version(request, live) for request in snapshot])

    def sleep(self) -> Sequence[Output]:
        with self._shared.turns:
            outputs = self._abort(None)
            self._member.asleep = True
            if self._shared.all_are(lambda one: one.asleep or one.closed):
                self._shared.engine.sleep()
            return outputs

    def close(self) -> None:
        member = self._member
        with self._shared.turns:
            if member.closed:
                return
            member.closed = True
            if self._shared.all_are(lambda one: one.closed):
                self._shared.engine.close()
            else:
                self._shared.take_back(member, list(member.rows.values()))
                member.fail(None)

    def _abort(self, chosen: set[str] | None) -> list[Output]:
        member = self._member
        ended = member.take_outputs(chosen)
        waiting = member.withdraw(chosen)
        rows = [r for r in member.rows.values() if chosen is None or r.request.request_id in chosen]
        outputs = self._shared.take_back(member, rows)
        member.release(outputs)
        member.forget_unused()
        return [*ended, *outputs, *waiting]
