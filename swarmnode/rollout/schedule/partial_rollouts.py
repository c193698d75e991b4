"""Partial rollouts: whole groups round after round, without ever waiting for the longest answer.

examples -> [PartialRollouts] -> Answered -> scoring -> trainer -> set_policy -> next round
                  ^
                  v  requests, steps, outputs
               Engine

A round hands out N groups. Everything else in flight by then is neither waited for nor discarded:

refill: the engine always has C requests. A finished one makes room for the next; when the policy
    changes, the others continue (departure_order.py keeps them young enough, and the first rounds unbiased).
april: r*N groups start, nothing is refilled, and after N complete ones the rest is aborted and resumes first
    in the next round (arXiv 2509.18521). Here for comparison; unlike in the paper, groups that complete in
    the same step as the last one are kept.
sync: N groups start, and the round waits for all of them.

In every mode, requests that already have tokens go first, then members of groups that have begun, then new
groups; and no handed-out token is older than the newest policy version minus `max_lag`.

If a task answers back, a completion continues after each answer (conversations.py). While it waits for one,
it counts as in flight: its place in the engine stays reserved.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count, islice

from swarmnode.errors import EngineError, RequestRefused
from swarmnode.rollout.engine import Engine, Output, PolicyUpdate, Request, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.concurrency_control import ConcurrencyControl
from swarmnode.rollout.schedule.conversations import NO_CONVERSATIONS, ConversationRules, Conversations
from swarmnode.rollout.schedule.departure_order import DepartureOrder, due_in_rounds, leaves_room
from swarmnode.rollout.schedule.group_pool import GroupPool
from swarmnode.rollout.schedule.length_estimates import LengthEstimates
from swarmnode.rollout.schedule.open_group import (
    Answered,
    OpenCompletion,
    OpenGroup,
    as_open_group,
    completion_seed,
)
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.rollout.schedule.partial_stats import PartialCounters, PartialStats
from swarmnode.rollout.schedule.requests_in_flight import RequestsInFlight, cheapest_mode
from swarmnode.rollout.schedule.scheduler_state import decode, encode
from swarmnode.types import Example, ExampleKey

logger = logging.getLogger(__name__)

SamplingOf = Callable[[Example, int], SamplingParams]
"""Returns the sampling settings of one completion, by its example and its place in the group. Its seed is
replaced by ours."""

MOST_OTHERS = 15  # policies that an engine may serve besides ours


class PartialRollouts:
    """Drives an engine, in which nobody else may have requests, from one thread, and blocks it. The caller
    may take its time between two groups; the engine rests meanwhile.

    >>> rollouts = PartialRollouts(engine, renderer, settings, sampling, seed=0)      # doctest: +SKIP
    >>> for answered in rollouts.round(examples): score(answered)                     # doctest: +SKIP
    >>> rollouts.set_policy(update)                                                   # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        settings: PartialSettings,
        sampling: SamplingParams,
        *,
        seed: int | None,
        sampling_of: SamplingOf | None = None,
        conversations: ConversationRules = NO_CONVERSATIONS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`seed` and the name of a completion make its sampling seed; None seeds nothing, which is cheaper on
        vLLM (it draws for seeded rows one by one). `sampling_of` replaces `sampling` for single completions:
        benchmarks force lengths with it. `conversations`: needed if a task answers back. `clock` times steps
        and environments."""
        self._engine = engine
        self._renderer = renderer
        self._settings = settings
        self._seed = seed
        self._sampling_of: SamplingOf = sampling_of or (lambda example, place: sampling)
        self._clock = clock
        # Only "refill" chooses. The others submit everything that a round may start; requests that cannot run
        # wait.
        everything = (settings.groups + settings.groups_ahead) * settings.group_size
        self._control = ConcurrencyControl(
            round_requests=settings.round_requests,
            max_running=engine.capabilities.max_running,
            max_lag=settings.max_lag,
            fixed=settings.concurrency if settings.mode == "refill" else everything,
        )
        self._lengths = LengthEstimates()
        self._pool = GroupPool()
        self._turns = DepartureOrder()
        self._serials = count()
        self._in_engine = RequestsInFlight()
        self._conversations = Conversations(conversations, renderer, self._budget, clock=clock)
        self._version = engine.policy_version
        self._only_decodes = False  # the next step starts nothing and recomputes nothing
        self._silent_steps = 0
        self._longest_budget = 1
        self._tally = PartialCounters()

    def round(
        self,
        examples: Iterator[Example],
        *,
        groups: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Generator[Answered, None, None]:
        """Hands out `groups` whole groups (None: N), each as soon as it is complete; fewer if stopped or out
        of examples.

        `examples` continues from round to round: a later round hands out the examples that an earlier one
        took but did not hand out. An example that the engine refuses is logged and skipped, and the next one
        takes its place.
        """
        with closing(self.in_steps(examples, groups=groups, should_stop=should_stop)) as steps:
            for answered in steps:
                if answered is not None:
                    yield answered

    def in_steps(
        self,
        examples: Iterator[Example],
        *,
        groups: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Generator[Answered | None, None, None]:
        """Runs a `round` that may pause for any time: yields None before each step of the engine, after the
        requests that the step will start have been submitted."""
        self._control.choose()
        places = self._settings.groups if groups is None else groups
        try:
            while places:
                if self._engine.policy_version != self._version:  # Only a jump makes a group too old.
                    self._drop_older_than_allowed()
                self._listen(should_stop)
                if (group := self._next_out(places)) is not None:
                    places -= 1
                    yield self._hand_out(group)
                    continue
                if should_stop():
                    return
                self._fill(examples, places)
                if self._in_engine:
                    yield None
                    self._step()
                elif self._conversations:
                    self._conversations.wait()
                else:
                    return
        finally:
            if self._settings.mode != "refill":
                self.park()

    def set_policy(self, update: PolicyUpdate) -> None:
        """Samples from another policy from now on; requests in flight continue by the cheapest mode that the
        engine has. If called between rounds, one version at a time, it makes no group too old."""
        if (mode := cheapest_mode(self._engine)) is None:
            self.park()
            self._engine.set_policy(update)
        else:
            self._engine.set_policy(update, mode)
        self._only_decodes = False

    def park(self) -> None:
        """Takes everything out of the engine, before an evaluation or sleep. The next round resumes it."""
        if self._in_engine:
            self._take_back(self._engine.abort(list(self._in_engine)))
        for group in self._pool.begun.values():
            group.settle_age()

    def state(self, untrained: Sequence[Answered] = ()) -> bytes:
        """Returns everything unfinished or kept, as bytes. Running requests continue. `untrained` groups were
        handed out but not trained on yet: after `restore` they come out first."""
        requests = self._engine.snapshot() if self._in_engine else ()
        sampled = {request.request_id: request.sampled for request in requests}
        # Requests that ended in another member's step wait to be handed out.
        for output in self._engine.abort([name for name in self._in_engine if name not in sampled]):
            self._finish(output)
        groups = [*map(as_open_group, untrained), *self._pool.unhanded]
        return encode(groups, sampled, self._lengths, self._turns.allowed)

    def restore(
        self, state: bytes, redraw: Callable[[ExampleKey], Example | None], *, older: int = 0
    ) -> None:
        """Continues from a `state()`, here or elsewhere, in place of the groups under way. `redraw` draws an
        example again; groups whose example it cannot find are dropped and counted. The complete groups of one
        round may be `older` versions older than `max_lag` allows.

        Raises CheckpointError for a damaged or foreign state, and changes nothing in that case.
        """
        kept = decode(state)
        found = [(redraw(key), members) for key, members in kept.groups]
        groups = [self._revived(example, members) for example, members in found if example is not None]
        self.park()
        self._pool = GroupPool(groups)
        self._conversations.forget_all()
        for group in groups:
            self._conversations.revive(group)
        self._lengths = kept.lengths
        self._turns = DepartureOrder(len(groups) if kept.may_stay_behind is None else kept.may_stay_behind)
        self._tally.dropped_not_redrawable += len(found) - len(groups)
        self._version = self._engine.policy_version
        spared = [group for group in self._pool.complete if -older <= self._due(group) < 0]
        self._drop_older_than_allowed(spared[: self._settings.groups])

    def stats(self) -> PartialStats:
        tally, pool, cost = self._tally, self._pool, self._control.cost
        return PartialStats(
            groups_in_flight=len(pool.begun) - len(pool.complete),
            surplus_groups=len(pool.complete),
            concurrency=self._control.concurrency,
            step_base_s=cost and cost.base_s,
            step_per_request_s=cost and cost.per_request_s,
            dropped_stale=tally.dropped_stale,
            dropped_not_redrawable=tally.dropped_not_redrawable,
            refused=tally.refused,
            resumed_requests=tally.resumed,
            idle_share=None if tally.busy.mean is None else 1 - tally.busy.mean,
            mean_tokens_produced=tally.produced.mean,
            mean_tokens_trained=tally.trained.mean,
        )

    def _next_out(self, places: int) -> OpenGroup | None:
        """Returns the complete group that is due first, if it may leave."""
        complete = self._pool.complete
        if not complete or self._settings.mode != "refill":
            return min(complete, key=self._due, default=None)
        in_turn = complete
        if self._settings.in_turn:
            youngest = self._turns.youngest_to_leave(self._pool.begun)
            in_turn = [group for group in complete if group.serial <= youngest or self._due(group) <= 0]
        # Age goes before order: if the groups in turn must let others leave first, the others do.
        for first in (in_turn, complete if in_turn else ()):
            group = min(first, key=self._due, default=None)
            if group is not None and self._leaves_room(group, places):
                return group
        return None

    def _leaves_room(self, group: OpenGroup, places: int) -> bool:
        others = (self._due(other) for other in self._pool.begun.values() if other is not group)
        return leaves_room(self._due(group), others, places, self._settings.groups)

    def _hand_out(self, group: OpenGroup) -> Answered:
        self._pool.forget(group)
        self._turns.left(group.serial, self._pool.begun)
        self._tally.trained.add(group.tokens, len(group.members))
        environment = self._conversations.rules.environment_of(group.example)
        return group.answered(self._renderer, in_turns=environment is not None)

    def _due(self, group: OpenGroup) -> int:
        return due_in_rounds(group.oldest_version, self._version, self._settings.max_lag)

    def _drop_older_than_allowed(self, spared: Sequence[OpenGroup] = ()) -> None:
        """Starts over the groups that are too old for the newest policy."""
        self._version = self._engine.policy_version
        kept = {group.serial for group in spared}
        begun = self._pool.begun.values()
        stale = [group for group in begun if self._due(group) < 0 and group.serial not in kept]
        for group in stale:
            logger.info("%s starts over: it is more than %d versions old", group.name, self._settings.max_lag)
            self._withdraw(group)
            self._pool.start_over(group)
        self._tally.dropped_stale += len(stale)

    def _fill(self, examples: Iterator[Example], places: int) -> None:
        """Submits requests until C are in the engine, or until there are none left to submit."""
        in_all = self._in_flight + self._control.free_slots(self._in_flight)
        while self._in_flight < in_all:
            if not self._pool.has_line and not self._begin(examples, places):
                return
            self._submit(*self._pool.next_members(in_all - self._in_flight))

    @property
    def _in_flight(self) -> int:
        """Number of requests in the engine and of those that wait for their environment."""
        return len(self._in_engine) + len(self._conversations)

    def _begin(self, examples: Iterator[Example], places: int) -> bool:
        """Queues the next new group. Returns False if none may begin now, or if there is none."""
        room = places + self._settings.groups_ahead - len(self._pool.begun)
        if room <= 0:
            return False
        if not self._pool.drawn:
            drawn = list(islice(examples, min(room, self._settings.groups)))
            empty = [OpenCompletion()] * self._settings.group_size
            self._pool.drawn.extend(
                self._group(example, list(empty)) for example in self._lengths.longest_first(drawn)
            )
        if not self._pool.drawn:
            return False
        self._pool.begin()
        return True

    def _submit(self, group: OpenGroup, places: list[int]) -> None:
        requests = [self._request(group, place) for place in places]
        try:
            self._engine.submit(requests)
        except RequestRefused as error:
            self._leave_out(group, error)
            return
        group.asked_of(self._engine.policy_version)
        self._in_engine.add(group, places, requests)
        self._tally.resumed += sum(len(one.sampled) > one.sampled.turn_start for one in requests)
        self._tally.refused_in_a_row = 0
        budgets = (request.sampling.max_tokens for request in requests)
        self._longest_budget = max(self._longest_budget, *budgets)
        self._only_decodes = False

    def _leave_out(self, group: OpenGroup, error: RequestRefused) -> None:
        logger.warning("skipping %s: %s", group.name, error)
        self._withdraw(group)
        self._pool.forget(group)
        self._tally.refused += 1
        self._tally.refused_in_a_row += 1
        if self._tally.refused_in_a_row > self._settings.groups:
            raise EngineError(
                f"the engine refused all examples of a round, the last because: {error.message}",
                hint=error.hint,
            ) from error

    def _listen(self, should_stop: Callable[[], bool]) -> None:
        """Resumes members whose environment has answered, or ends them."""
        if not self._conversations or should_stop():
            return
        going_on: dict[int, tuple[OpenGroup, list[int]]] = {}
        for group, place in self._conversations.heard(should_stop):
            if group.members[place].finish is not None:
                self._ended(group, place)
            elif place in group.for_the_engine:
                going_on.setdefault(group.serial, (group, []))[1].append(place)
        for group, places in going_on.values():
            self._submit(group, places)

    def _step(self) -> None:
        requests, context = len(self._in_engine), self._in_engine.context
        started = self._clock()
        outputs = self._engine.step()
        took = self._clock() - started if self._only_decodes else None
        self._control.observe_step(requests, took, context)
        self._in_engine.step_done()
        self._only_decodes = True
        self._tally.busy.add(requests, max(requests, self._control.concurrency))
        for output in outputs:
            self._finish(output)
        self._silent_steps = 0 if outputs else self._silent_steps + 1
        # Each step of a working engine brings a token, if only of others' answers that are ahead of ours.
        if self._silent_steps > (requests + MOST_OTHERS) * self._longest_budget:
            raise EngineError(f"{requests} requests never finished", hint="try another --engine")

    def _finish(self, output: Output) -> None:
        group, place = self._in_engine.take(output)
        if not self._conversations.turn_over(group, place):
            self._ended(group, place)

    def _ended(self, group: OpenGroup, place: int) -> None:
        tokens = len(group.members[place].sampled)
        self._control.observe_completion(tokens)
        self._tally.produced.add(tokens)
        if group.complete:
            self._pool.complete.append(group)
            self._lengths.observe(group.example, group.tokens / len(group.members))

    def _take_back(self, outputs: Iterable[Output]) -> None:
        """Queues aborted requests before all others. Some may have ended before the abort."""
        for output in outputs:
            if output.finish == "abort":
                self._in_engine.take(output)
            else:
                self._finish(output)
        self._pool.line_up(self._in_engine)

    def _withdraw(self, group: OpenGroup) -> None:
        """Gives up all requests and questions of a group."""
        self._conversations.forget(group)
        asked = [name for place in group.unfinished if (name := group.request_id(place)) in self._in_engine]
        for output in self._engine.abort(asked):
            self._in_engine.take(output)

    def _request(self, group: OpenGroup, place: int) -> Request:
        request = group.request(place, self._sampling(group.example, place))
        environment = self._conversations.rules.environment_of(group.example)
        if environment is None:
            return request
        return replace(request, goes_on=group.members[place].turns < environment.most_turns)

    def _budget(self, example: Example, place: int) -> int:
        return self._sampling_of(example, place).max_tokens

    def _sampling(self, example: Example, place: int) -> SamplingParams:
        seed = None if self._seed is None else completion_seed(self._seed, example.key, place)
        return replace(self._sampling_of(example, place), seed=seed)

    def _group(self, example: Example, members: list[OpenCompletion]) -> OpenGroup:
        return OpenGroup(next(self._serials), example, self._renderer.prompt_ids(example.prompt), members)

    def _revived(self, example: Example, members: list[OpenCompletion]) -> OpenGroup:
        group = self._group(example, members)
        group.settle_age()
        for place in group.for_the_engine:
            group.end_at(place, self._request(group, place).sampling.max_tokens)
        return group
