"""Questions that the replicas of a stage ask each other at the end of an iteration.

replica_exchange.py -> [replica_questions] -> member_streams.py -> replica_answers.py of a replica
"""

from swarmnode.extensions.pipeline.replication.gradient_exchange import StageIteration
from swarmnode.extensions.pipeline.wire.services import MemberMessage


class StageQuestion(MemberMessage, frozen=True):
    stage_iteration: StageIteration


class AskGradients(StageQuestion, frozen=True, tag="gradients"):
    """Asks for a replica's contribution: its `Head`, with the bytes behind it."""


class AskDigest(StageQuestion, frozen=True, tag="digest"):
    """Asks for the `ReplicaWeights`: digests of the weights after the step, and before."""


Question = AskGradients | AskDigest
