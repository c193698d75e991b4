"""Replicas that claim more than they did, or keep questions waiting."""

import asyncio

import pytest

from swarmnode.extensions.pipeline.replication.contribution_tally import combined
from swarmnode.extensions.pipeline.replication.contributions import contribute
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    ContributionBounds,
    ContributionFault,
    StageIteration,
)
from swarmnode.extensions.pipeline.replication.replica_answers import MAX_WAITING
from swarmnode.extensions.pipeline.replication.replica_questions import AskDigest
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL
from swarmnode.extensions.pipeline.wire.services import MemberService
from tests.unit.extensions.pipeline import raw_wire
from tests.unit.extensions.pipeline.replication.test_replica_exchange import (
    KEYS,
    PLAN,
    SHAPES,
    gradients,
    peers,
    replicas,
    stage_of_two,
)


@pytest.mark.parametrize("claimed, counts", [(98_304, False), (385, False), (384, True)])
def test_whoever_claims_many_times_the_others_tokens_is_left_out(claimed: int, counts: bool) -> None:
    expected = ContributionBounds(SHAPES, max_tokens=98_304, max_visits=24)
    sums = [*(gradients(n, tokens=48) for n in range(3)), gradients(3, tokens=claimed)]
    came = {key.peer_id: contribute(own, expected) for own, key in zip(sums, KEYS, strict=False)}
    held = {author: one.digest for author, one in came.items()}
    found = combined(came, {}, [held] * 4, max_norm_ratio=16.0)
    assert found.rejected == ({} if counts else {KEYS[3].peer_id: ContributionFault.WEIGHT})
    assert found.sum.tokens == 144 + claimed * counts


async def test_only_replicas_ask_and_not_for_what_is_far_away() -> None:
    async with replicas(3) as (exchanges, hosts):
        exchanges[0].admit(peers(0, 1, 2), stage_of_two())

        async def ask(asker: int, iteration: int, stage: int = 1) -> None:
            stream = await hosts[asker].open_stream(hosts[0].peer_id, PROTOCOL)
            question = AskDigest(StageIteration(PLAN, stage, iteration))
            await raw_wire.write(stream, MemberService.GRADIENTS, question)

        refused = exchanges[0]._streams.incoming.refused
        await ask(2, 4)
        await ask(1, 4, stage=0)
        await ask(1, 6)
        for _ in range(MAX_WAITING + 1):
            await ask(1, 5)
        for _ in range(100):
            if refused.total() == 4:
                break
            await asyncio.sleep(0.01)
        assert refused == {"not_a_member": 2, "too_early": 1, "too_many_streams": 1}
