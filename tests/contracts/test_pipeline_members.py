"""Three members train two iterations, over hosts of either kind, and come to what one process comes to."""

from pathlib import Path

import torch

from benchmarks.pipeline_local import LocalPipeline
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, cross_entropy
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.identity import key_file
from tests.contracts.hosts import HostFactory
from tests.unit.extensions.pipeline.members import PATIENT, ListFeed, crew, instance_of, sgd, stage_worker
from tests.unit.extensions.pipeline.tiny_models import (
    SETTINGS,
    batches,
    nudge,
    saved,
    tiny_config,
    tiny_model,
)

ENDS = [2, 4, 6]


async def test_members_train_together(new_host: HostFactory, tmp_path: Path) -> None:
    packs, folder = try_cut(tiny_config()), saved(tiny_model(), tmp_path / "model")
    plan = Plan(instance_of([[0], [1], [2]], path_length=3), ((0, 1, 2), (0, 1, 2)))
    used = batches(packed=True)
    hosts = [new_host() for _ in range(3)]
    local = LocalPipeline.load(folder, ENDS, SETTINGS, packs=packs)
    for worker in local.workers:
        nudge(worker.model.trainable())
    optimizers = [sgd(worker) for worker in local.workers]

    async with crew(
        plan,
        lambda stage: stage_worker(folder, ENDS, stage, packs, SETTINGS),
        settings=PATIENT,
        hosts=hosts,
        keys=[key_file.load(tmp_path / f"{number}.key") for number in range(3)],
    ) as found:
        for step in (1, 2):
            report = await found.nodes[0].member.train(ListFeed(used, 2))
            assert (report.micro_batches, report.retried) == (4, 0)
            for node in found.nodes:
                await node.member.wait_step(step)
            for number in range(4):
                local.accumulate(LossInputs(used[number % len(used)], (0, 1, 2)), cross_entropy(1))
            for worker, optimizer, one in zip(local.workers, optimizers, local.take_gradients(), strict=True):
                worker.apply(one.of_step(1), optimizer, max_norm=1e9)
        for worker, node in zip(local.workers, found.nodes, strict=True):
            ours = node.worker.model.trainable()
            for name, parameter in worker.model.trainable().items():
                torch.testing.assert_close(ours[name], parameter, rtol=0, atol=1e-5)
