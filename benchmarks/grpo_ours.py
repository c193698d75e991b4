"""Our side of benchmarks/grpo.py: the embedded engine and the trainer, as a node runs them in mode sync.

grpo.py -> [grpo_ours] -> training/evaluation.py, training/trainer.py
"""

from itertools import count

import torch
from grpo_job import Job, Turns, job_from_command_line, prompts, reward

from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.node.building.machine_memory import plan_for
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config, PolicyConfig, RolloutConfig, TrainingConfig
from swarmnode.training.evaluation import collect
from swarmnode.training.forward import Forward
from swarmnode.training.trainer import Trainer
from swarmnode.types import Example, ExampleKey, RolloutGroup


def serve() -> None:
    """Steps for as long as they are asked for."""
    torch.set_num_threads(1)
    job = job_from_command_line()
    learner = Learner(job)
    turns = Turns(job.samples)
    for number in range(job.steps):
        if not turns.wait():
            return
        turns.sampled(learner.step(number))
        turns.done()


class Learner:
    """Generates, scores and trains."""

    def __init__(self, job: Job) -> None:
        config = PolicyConfig(
            lora_rank=job.rank,
            lora_alpha=2 * job.rank,
            dtype=("bfloat16" if job.dtype == "bfloat16" else "float32") if job.tuned else "auto",
            device="cpu",
            cpu_kernels="auto" if job.kernels else "off",
        )
        base = load_base_model(job.model, config)
        self._job = job
        self._policy = Policy(base, config, seed=0)
        self._renderer = Renderer(base.tokenizer, base.eos_token_ids)
        self._engine = EmbeddedEngine(base.model, base.eos_token_ids, max_slots=job.samples)
        self._sampling = SamplingParams(job.max_tokens)
        training = TrainingConfig(learning_rate=job.learning_rate, sequences_per_step=job.samples)
        rollout = RolloutConfig(max_tokens=job.max_tokens, slots=job.samples)
        settings = Config(policy=config, training=training, rollout=rollout)
        forward = Forward(
            self._policy, training, temperature=1.0, budget=plan_for(settings, job.model).budget
        )
        self._trainer = Trainer(
            self._policy,
            training,
            temperature=1.0,
            max_tokens=job.max_tokens,
            seed=0,
            render=self._renderer.prompt_ids,
            forward=forward,
        )
        keys = (ExampleKey("grpo", "1", 0, index) for index in count())
        asked = prompts(job)
        self._examples = iter([Example(key, prompt) for key, prompt in zip(keys, asked, strict=False)])

    def step(self, number: int) -> int:
        """One GRPO step; returns the completion tokens that were sampled."""
        examples = [next(self._examples) for _ in range(self._job.prompts)]
        answered = collect(
            self._engine, self._renderer, examples, self._job.group, self._sampling, seed=number
        )
        groups = [
            RolloutGroup(
                one.example,
                one.completions,
                tuple({"reward": reward(completion.text)} for completion in one.completions),
                "me",
                self._policy.version,
            )
            for one in answered
        ]
        self._trainer.train(groups, [])
        self._engine.set_policy(self._policy.update())
        return sum(len(completion.token_ids) for group in groups for completion in group.completions)
