"""The status of the pipeline, as one of its members sees it.

IterationReport, plan, stage, members -> [PipelineView] -> PipelineStatus -> pipeline_node.py (NodeStatus)
"""

import time

import msgspec

from swarmnode.extensions.pipeline.execution.member_records import IterationReport
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStage
from swarmnode.node.showing.node_status import PipelineStatus
from swarmnode.training.records import Counters


class PipelineView:
    """The pipeline's status, kept up to date by the member. Counters start at zero with the process."""

    def __init__(self, name: str, peer_id: str) -> None:
        """`name`: of the pipeline."""
        self._peer_id = peer_id
        self._started_s = time.monotonic()
        self.lost: set[str] = set()
        """Peer ids of members that did not answer us."""
        self.status = PipelineStatus(name=name)
        self.counters = Counters()
        """Rounds, tokens and seconds trained here as a data node."""

    def stepped(self, report: IterationReport) -> None:
        """Record an iteration that this node ran."""
        self.counters.round = report.iteration + 1
        self.counters.tokens += report.tokens
        self.counters.seconds = time.monotonic() - self._started_s
        before = self.status
        self.status = msgspec.structs.replace(
            before,
            iteration_s=report.makespan_s + report.closing_s,
            busy_share=report.busy_share,
            repaired=before.repaired + report.retried,
            given_up=before.given_up + report.given_up,
            stragglers=before.stragglers + report.stragglers,
        )

    def look_at(self, own_stage: OwnStage, *, members: int, iteration: int) -> None:
        """Update the status. `members`: living members, ours included. `iteration`: optimizer steps taken."""
        agreed, part = own_stage.agreed, own_stage.part
        stage = agreed.stage_of(self._peer_id) if agreed is not None and part is not None else None
        stages = agreed.partition.stages if agreed is not None else ()
        self.status = msgspec.structs.replace(
            self.status,
            stage=stage,
            stages=len(stages) or None,
            first_layer=part.first_layer if part is not None else None,
            end_layer=part.end_layer if part is not None else None,
            replicas=len(stages[stage].peers) if stage is not None else None,
            members=members,
            plans=own_stage.plans,
            iteration=iteration,
            planned_s=agreed.makespan_s if agreed is not None else None,
            lost=len(self.lost),
        )
