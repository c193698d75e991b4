"""A change of plan as its convener carries it out, from the proposal until all members have begun.

convener.py: who lives, what they hold -> [former_stages, ProposalRound] -> requests -> RoundOutcome

The convener knows no more than others and decides nothing that they do not check: it names the inputs, each
member computes the plan, and the round goes on only with members that came to the same one. Members that keep
their layers are assigned first, so that those who have to load find somebody to load from. Whatever fails
ends the round, names who failed, and the next round, with a higher epoch, is held without them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from swarmnode.errors import NetworkError
from swarmnode.extensions.pipeline.membership.follower import MAX_EPOCH_LEAP
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.membership.membership_messages import (
    Ask,
    Begin,
    Hold,
    Ping,
    ProposalProgress,
    Propose,
    Request,
    Status,
    TakeAssignment,
)
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, FormerStages, must_load
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused, Refusal

MAX_HOLDS = 5
"""Times that the iteration is put off because a member has begun it, before the round is given up."""

MAX_SILENT = 3
"""Requests in a row that a member may leave unanswered."""


@dataclass(slots=True)
class RoundOutcome:
    """The result of a round."""

    begun: bool = False
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Members that did not do their part, with the reason. Our own peer id: these inputs give no plan."""
    again: dict[str, str] = field(default_factory=dict[str, str])
    """Members that may do better next time, with the reason: they moved meanwhile, could not take their
    assignment, or did not answer. The dead among them are not in the next round."""
    outbid: dict[str, str] = field(default_factory=dict[str, str])
    """Members that report another convener's proposal, with their words."""
    resign: bool = False
    """True if most others computed one plan that is not ours: then ours is the faulty computation."""


def former_stages(statuses: Mapping[str, Status]) -> FormerStages | None:
    """Return the stages that members say they hold, in the division that most of them hold layers of. Members
    of other divisions hold nothing.

    >>> former_stages({}) is None
    True
    """
    holding = {
        peer: each for peer, each in statuses.items() if each.ends and 0 <= each.stage < len(each.ends)
    }
    if not holding:
        return None
    votes = Counter(each.ends for each in holding.values())
    newest = {each.ends: each.in_force for each in sorted(holding.values(), key=lambda each: each.in_force)}
    ends = max(votes, key=lambda ends: (votes[ends], newest[ends], ends))
    return FormerStages(
        ends, {peer: holding[peer].stage for peer in sorted(holding) if holding[peer].ends == ends}
    )


def target_iteration(statuses: Iterable[Status]) -> int:
    """Return the first iteration that no member has begun, as far as members in step with most others say.

    A member more than one iteration ahead of the middle one is out of step, or lies: it is not waited for.
    """
    said = [each for each in statuses if each.stage >= 0] or list(statuses)
    if not said:
        return 0
    middle = sorted(each.iteration for each in said)[(len(said) - 1) // 2]
    return max(each.iteration + each.busy for each in said if each.iteration <= middle + 1)


def next_epoch(own: int, statuses: Iterable[Status]) -> int:
    """Return an epoch above every one in use. An epoch far above the middle one is ignored: it would use up
    the numbers."""
    said = sorted([own, *(each.epoch for each in statuses)])
    within = (said[(len(said) - 1) // 2] if own == 0 else own) + MAX_EPOCH_LEAP // 2
    return 1 + max(epoch for epoch in said if epoch <= within)


class ProposalRound:
    """Carries out one proposal."""

    def __init__(
        self,
        ask: Ask,
        own: str,
        members: Iterable[str],
        settings: MembershipSettings,
        agreed: Callable[[], AgreedPlan | None],
    ) -> None:
        """`agreed`: returns the plan that we computed from our proposal, None before."""
        self._ask = ask
        self._own = own
        self._members = sorted(members)
        self._settings = settings
        self._agreed = agreed
        self._epoch = 0
        self._statuses: dict[str, Status] = {}
        self._out = RoundOutcome()

    async def run(self, proposal: Propose) -> RoundOutcome:
        """Carry out the proposal as far as it goes."""
        others = [peer for peer in self._members if peer != self._own]
        settings, self._epoch = self._settings, proposal.epoch
        # First alone: inputs without a plan are nobody else's business.
        for peers in ([self._own], others):
            if not await self._tell(peers, proposal):
                return self._out
            if not await self._until(peers, lambda status: bool(status.proposed), settings.prepare_s):
                return self._out
        if not self._all_agree():
            return self._out
        if not await self._until(self._members, _has(ProposalProgress.PREPARED), settings.prepare_s):
            return self._out
        iteration, agreed = await self._hold(), self._agreed()
        if iteration is None or agreed is None:
            return self._out
        loading = {*must_load(agreed, agreed.before)}
        keeping = [peer for peer in self._members if peer not in loading]
        for peers, within_s in ((keeping, settings.iteration_s), (sorted(loading), 0.0)):
            within_s += settings.catch_up_s + settings.assignment_s
            if not await self._tell(peers, TakeAssignment(self._epoch, iteration)):
                return self._out
            if not await self._until(peers, _has(ProposalProgress.READY), within_s):
                return self._out
        # We last: a word that gets lost is heard from our own status, as long as we are there to say it.
        self._out.begun = await self._tell([*others, self._own], Begin(self._epoch))
        return self._out

    async def _hold(self) -> int | None:
        """Find the iteration from which on all members wait, and hold them. Returns None if the round is
        over.

        A status may be as old as the loading of a newcomer took. So the answers to each try, and another look
        at the members that refuse it, determine the iteration of the next.
        """
        iteration = target_iteration(self._statuses.values())
        begun: list[str] = []
        for _ in range(MAX_HOLDS):
            begun = []
            if not await self._tell(self._members, Hold(self._epoch, iteration), begun):
                return None
            await self._look(begun, Counter())
            if not self._goes_on:
                return None
            target = target_iteration(self._statuses.values())
            if not begun and target <= iteration:
                return iteration
            iteration = max(target, iteration + 1)
        self._out.failed |= {peer: "begins one iteration after the other" for peer in begun}
        return None

    async def _tell(self, peers: Iterable[str], request: Request, begun: list[str] | None = None) -> bool:
        """Send a request to all of these members at once. Returns False if the round is over. `begun`
        collects members that refuse because the iteration has begun."""

        async def tell(peer: str) -> None:
            try:
                self._statuses[peer] = await self._ask(peer, request, self._settings.answer_s)
            except MemberRefused as error:
                if begun is not None and error.reason == Refusal.BEGUN:
                    begun.append(peer)
                elif error.reason in (Refusal.OUTBID, Refusal.OTHER_EPOCH, Refusal.NOT_CONVENER):
                    self._out.outbid[peer] = str(error)
                elif error.reason == Refusal.WRONG_PART:
                    self._out.again[peer] = str(error)
                else:
                    self._out.failed[peer] = f"refused {type(request).__name__.lower()}: {error}"
            except NetworkError as error:
                self._out.again[peer] = str(error)

        await of_each(peers, tell)
        return self._goes_on

    async def _until(self, peers: Iterable[str], reached: Callable[[Status], bool], within_s: float) -> bool:
        """Ask these members for their status until all have `reached` something. Returns False if the round
        is over."""
        clock = asyncio.get_running_loop().time
        ends_at_s = clock() + within_s
        silent: Counter[str] = Counter()
        missing = list(peers)
        while True:
            await self._look(missing, silent)
            missing = [peer for peer in missing if peer in silent or not reached(self._statuses[peer])]
            if not self._goes_on or not missing:
                return self._goes_on
            if clock() > ends_at_s:
                self._out.failed |= {peer: f"not done within {within_s:.0f} s" for peer in missing}
                return False
            await asyncio.sleep(self._settings.poll_s)

    async def _look(self, peers: Iterable[str], silent: Counter[str]) -> None:
        epoch, answer_s = self._epoch, self._settings.answer_s

        async def look(peer: str) -> None:
            try:
                status = await self._ask(peer, Ping(self._statuses[self._own]), answer_s)
            except (NetworkError, MemberRefused) as error:
                silent[peer] += 1
                if silent[peer] >= MAX_SILENT:
                    self._out.again[peer] = str(error)
                return
            silent.pop(peer, None)
            self._statuses[peer] = status
            if status.epoch > epoch + MAX_EPOCH_LEAP:
                self._out.failed[peer] = f"claims epoch {status.epoch}, the latest is {epoch}"
            elif status.epoch > epoch:
                self._out.outbid[peer] = f"has taken epoch {status.epoch}, the latest is {epoch}"
            elif status.epoch < epoch:
                self._out.failed[peer] = "forgot the proposal: it was restarted"
            elif status.progress == ProposalProgress.FAILED:
                told = self._out.failed if peer == self._own else self._out.again
                told[peer] = status.detail or "failed"

        await of_each(peers, look)

    @property
    def _goes_on(self) -> bool:
        return not (self._out.failed or self._out.again or self._out.outbid)

    def _all_agree(self) -> bool:
        """Return True if all members computed the same plan. Otherwise fail those that differ, or resign if
        only ours does."""
        ours = self._statuses[self._own].proposed
        plans = {peer: self._statuses[peer].proposed for peer in self._members if peer != self._own}
        differ = [peer for peer, plan in plans.items() if plan != ours]
        if not differ:
            return True
        common, votes = Counter(plans.values()).most_common(1)[0]
        if common != ours and votes > len(self._members) / 2:
            self._out.resign = True
        else:
            why = "computed another plan from the same inputs: is its swarmnode another version?"
            self._out.failed |= dict.fromkeys(differ, why)
        return False


def _has(progress: ProposalProgress) -> Callable[[Status], bool]:
    """Return the test of a status for at least this progress."""
    order = list(ProposalProgress)
    reached = {*order[order.index(progress) :]} - {ProposalProgress.FAILED}
    return lambda status: status.progress in reached
