"""TRL's side of benchmarks/grpo.py: `GRPOTrainer` on the same model, prompts, sizes and LoRA rank.

grpo.py -> [grpo_trl] -> trl, in an environment of its own: nothing of swarmnode is installed there

As it comes it computes in bfloat16 by autocast and recomputes activations in the backward pass. Tuned, as a
person would who wants it fast on a CPU: no gradient checkpointing, the dtype of our side. Either way there is
no reference model (its default), nothing is logged or saved, and a generation serves one optimizer step.
"""

import tempfile

import torch
from datasets import Dataset
from grpo_job import Turns, job_from_command_line, prompts, reward
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepsWhenAsked(TrainerCallback):
    """Waits before each step until it may begin; it ends when the optimizer has moved."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_begin(self, args, state, control, **kwargs):
        self._go(control)

    def on_step_end(self, args, state, control, **kwargs):
        self._turns.done()
        self._go(control)

    def _go(self, control) -> None:
        if not self._turns.wait():
            control.should_training_stop = True


def serve() -> None:
    """Steps for as long as they are asked for."""
    torch.set_num_threads(1)
    job = job_from_command_line()
    turns = Turns(job.samples)

    def reward_of(completions, completion_ids, **kwargs) -> list[float]:
        turns.sampled(sum(map(len, completion_ids)))
        return [reward(text) for text in completions]

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="grpo-trl-"),  # made, and never written to
        use_cpu=True,
        **({"bf16": job.dtype == "bfloat16", "gradient_checkpointing": False} if job.tuned else {}),
        per_device_train_batch_size=job.samples,
        gradient_accumulation_steps=1,
        num_generations=job.group,
        max_completion_length=job.max_tokens,
        temperature=1.0,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        max_steps=job.steps,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype)),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        reward_funcs=reward_of,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": list(prompts(job))}),
        peft_config=LoraConfig(
            r=job.rank, lora_alpha=2 * job.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[StepsWhenAsked(turns)],
    )
    trainer.train()
