"""The state machine of one member in a change of plan: the requests it accepts and its next job. Pure.

requests of the convener -> [Follower] -> jobs for membership.py (plan, prepare, take), progress for statuses

none -> planning -> prepared -> held -> ready -> begun, each on the convener's word, failed from anywhere. The
former plan is in force until the assignment under the new one is taken, so training goes on while others plan
and load. A held member begins no iteration from the one named on; since all are held before any takes its
assignment, no iteration runs under two plans. A proposal with a higher (epoch, smaller peer id) replaces one
half-way, so two conveners at once end up with one plan.
"""

from collections.abc import Collection
from dataclasses import replace

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.membership.membership_messages import (
    ProposalProgress,
    Status,
)
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, FormerStages, PlanInputs, must_load
from swarmnode.extensions.pipeline.wire.refusals import MAX_DETAIL_CHARS, Refusal

MAX_EPOCH_LEAP = 10_000
"""Largest leap of a proposal's epoch beyond the known one. It is years of changes, and keeps a peer from
using up the numbers."""

MAX_ITERATION_LEAP = 100
"""Largest leap of a named iteration beyond the one that we would name: what we have heard may be seconds old,
in which a small model takes many steps."""

STEPS_TO_COME = 2
"""Most steps that a held member still closes: the one that closes now, and the one that data nodes have begun
already."""


class Follower:
    """The state of one member. Methods named after requests raise Rejected."""

    def __init__(self, own: str, *, catch_up_s: float) -> None:
        self._own = own
        self._catch_up_s = catch_up_s
        self.epoch = 0
        self.by = ""
        """Peer id of the member that made the latest proposal."""
        self.progress = ProposalProgress.NONE
        self.detail = ""
        self.iteration = 0
        self.busy = False
        self.in_force: AgreedPlan | None = None
        """The plan that micro-batches are sent under, or will be once it has `begun`."""
        self.ordered_at_s = 0.0
        """Time of the convener's last order."""
        self.stopped_since_s: float | None = None
        """Time since which one convener keeps us from working, whatever it ordered meanwhile; None if it does
        not."""
        self._inputs: PlanInputs | None = None
        self.proposed: AgreedPlan | None = None
        """The plan computed from the latest proposal, None before it is."""
        self._held_from = 0
        self._take_ordered = False
        self._began = False
        self._overtaken = False
        self._said: dict[str, str] = {}
        """Digest of the plan that each member of the latest proposal says it computed."""

    def propose(self, sender: str, inputs: PlanInputs, now_s: float, *, usual_epoch: int = 0) -> None:
        """Take a proposal, unless a better one is known. The same proposal again changes nothing.

        `usual_epoch`: that of most other members. It bounds the first epoch that a newcomer takes.
        """
        if (inputs.epoch, sender) == (self.epoch, self.by):
            return
        is_late = self.progress == ProposalProgress.BEGUN or sender > self.by
        if inputs.epoch < self.epoch or (inputs.epoch == self.epoch and is_late):
            raise Rejected(Refusal.OUTBID, f"epoch {self.epoch} is proposed by {self.by}")
        known = self.epoch or usual_epoch
        if inputs.epoch > known + MAX_EPOCH_LEAP:
            raise Rejected(Refusal.EPOCH_LEAP, f"from {known} to {inputs.epoch}")
        self._check_part(inputs.former)
        if sender != self.by and self.stopped_since_s is not None:
            # Later than now while it was given time to load: the next one is given no less (job_runner.py).
            self.stopped_since_s = now_s if self.stopped_since_s <= now_s else None
        self.epoch, self.by, self.detail = inputs.epoch, sender, ""
        self.progress, self._inputs, self.proposed = ProposalProgress.PLANNING, inputs, None
        self._said = {}
        self._take_ordered, self.ordered_at_s = False, now_s

    def hold(self, sender: str, epoch: int, iteration: int, now_s: float, *, expected: int = 0) -> None:
        """Begin no iteration from this one on. `expected`: the one that we would name."""
        self._check(sender, epoch)
        known = max(self.iteration, expected)
        if iteration > known + MAX_ITERATION_LEAP:
            raise Rejected(Refusal.ITERATION_LEAP, f"from iteration {known} to {iteration}")
        if self.progress not in (ProposalProgress.PREPARED, ProposalProgress.HELD):
            raise Rejected(Refusal.NOT_READY, f"{self.progress}, not prepared")
        if self.busy and self.iteration >= iteration:
            raise Rejected(Refusal.BEGUN, f"iteration {self.iteration} runs")
        self.progress, self._held_from, self.ordered_at_s = ProposalProgress.HELD, iteration, now_s
        if self.stopped_since_s is None:
            self.stopped_since_s = now_s

    def take(self, sender: str, epoch: int, iteration: int, now_s: float) -> None:
        self._check(sender, epoch)
        if self.progress in (ProposalProgress.READY, ProposalProgress.BEGUN):
            return
        if self.progress != ProposalProgress.HELD or iteration != self._held_from:
            raise Rejected(Refusal.NOT_READY, f"{self.progress} for iteration {self._held_from}")
        if not self._take_ordered:
            self._take_ordered, self.ordered_at_s = True, now_s

    def begin(self, sender: str, epoch: int, now_s: float) -> None:
        self._check(sender, epoch)
        if self.progress not in (ProposalProgress.READY, ProposalProgress.BEGUN):
            raise Rejected(Refusal.NOT_READY, f"{self.progress}, assignment not taken")
        self._begin(now_s)

    def stepped(self, iteration: int, now_s: float) -> None:
        """Record that our weights are at this iteration."""
        # A data node may have begun it before the step was told.
        self.busy = self.busy and iteration == self.iteration
        if iteration > self.iteration and self.stopped_since_s is not None:
            self.stopped_since_s = now_s
        if iteration > self.iteration and self.progress == ProposalProgress.HELD:
            self.ordered_at_s = now_s  # another may follow, and takes its time
        self.iteration = iteration

    def hear(self, sender: str, status: Status, now_s: float) -> None:
        """Take note of another member's status.

        It says which plan the member computed. If it says that our plan has begun, the convener's word got
        lost; if it follows a newer plan than ours, we have missed one.
        """
        is_in_it = self._inputs and any(each.member.peer_id == sender for each in self._inputs.announcements)
        if is_in_it and status.epoch == self.epoch and status.proposed:
            self._said[sender] = status.proposed
        same = self.in_force is not None and status.plan == self.in_force.digest
        if self.in_force is not None and self.in_force.epoch < status.in_force < self.epoch:
            self._overtaken = True
        if self.progress == ProposalProgress.READY and same and status.progress == ProposalProgress.BEGUN:
            self._begin(now_s)

    def job(self, now_s: float, living: Collection[str] = ()) -> PlanInputs | AgreedPlan | None:
        """Return what is to be done next, one at a time, or None: compute the plan of these inputs and report
        it by `planned`; while planning, load the weights of this plan as far as that goes ahead of time and
        report it by `prepared`; once held, take its assignment and report it by `taken`.

        `living`: other members that we hear ourselves."""
        if self.progress == ProposalProgress.PLANNING:
            return self.proposed or self._inputs
        if self.progress == ProposalProgress.HELD and self._take_ordered and self.proposed and not self.busy:
            # Further behind, or under a plan that others have left, it has no step to come.
            behind = self._held_from - self.iteration
            waits = self.in_force is not None and 0 < behind <= STEPS_TO_COME and not self._overtaken
            is_time = not waits or now_s >= self.ordered_at_s + self._catch_up_s
            # The convener's word alone does not do: it may have told others something else.
            if is_time and self.is_convinced(living):
                return replace(self.proposed, iteration=self._held_from)
        return None

    def is_convinced(self, living: Collection[str]) -> bool:
        """Return True if more than two thirds of the proposed plan's members, of us and those that we hear,
        have computed it.

        So no two plans with the same members are taken, and a plan is taken for sure, while less than a third
        of them lie. Half would not do: one liar that tells each half of the others what it wants to hear is
        in both majorities. If all had to agree, one liar could stop us.
        """
        if self.proposed is None:
            return False
        digest, asked = self.proposed.digest, self.proposed.members & {*living, self._own}
        agreeing = sum(peer == self._own or self._said.get(peer) == digest for peer in asked)
        return 3 * agreeing > 2 * len(asked)

    def planned(self, inputs: PlanInputs, agreed: AgreedPlan) -> None:
        if inputs is self._inputs:
            self.proposed = agreed
            if self._own not in must_load(agreed, self.former):
                self.progress = ProposalProgress.PREPARED

    def prepared(self, agreed: AgreedPlan) -> None:
        if agreed is self.proposed and self.progress == ProposalProgress.PLANNING:
            self.progress = ProposalProgress.PREPARED

    def taking(self) -> None:
        """Record that the former assignment is about to be left."""
        self.in_force, self._began = None, False
        if self.stopped_since_s is None:
            self.stopped_since_s = self.ordered_at_s

    def taken(self, agreed: AgreedPlan) -> None:
        """Record the assignment that we have now, even if the proposal was replaced meanwhile."""
        self.in_force, self._began, self.iteration = agreed, False, agreed.iteration
        self._overtaken = False
        if agreed.epoch == self.epoch and self.progress == ProposalProgress.HELD:
            self.progress = ProposalProgress.READY

    def failed(self, epoch: int, why: str) -> None:
        if epoch == self.epoch:
            self.progress, self.detail = ProposalProgress.FAILED, why[:MAX_DETAIL_CHARS]
            # It was not the convener that failed; where it was, it is passed over at this moment.
            self.stopped_since_s = None

    def may_begin(self, iteration: int) -> bool:
        """Return True if a data node may start this iteration under the plan in force."""
        if self.in_force is None or not self._began or self.in_force.node_of(self._own) is None:
            return False
        return self.progress != ProposalProgress.HELD or iteration < self._held_from

    @property
    def former(self) -> FormerStages | None:
        """The stages that members hold under the plan in force, None without one."""
        return self.in_force.as_former if self.in_force else None

    def _check_part(self, told: FormerStages | None) -> None:
        """Raises Rejected: wrong_part, if the stage that the proposal says we hold is not ours. Under another
        division of layers we hold none."""
        own = self.former
        ours = own.stage_of.get(self._own) if own and told and own.ends == told.ends else None
        theirs = told.stage_of.get(self._own) if told else None
        if ours != theirs:
            raise Rejected(Refusal.WRONG_PART, f"this member holds stage {ours}, not {theirs}")

    def _begin(self, now_s: float) -> None:
        self.progress, self._began, self.ordered_at_s = ProposalProgress.BEGUN, True, now_s
        self.stopped_since_s = None

    def _check(self, sender: str, epoch: int) -> None:
        if (epoch, sender) != (self.epoch, self.by):
            raise Rejected(
                Refusal.OTHER_EPOCH, f"epoch {self.epoch} by {self.by or 'nobody'} is the latest here"
            )
