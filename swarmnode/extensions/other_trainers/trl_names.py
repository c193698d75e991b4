"""TRL's names of settings, options and arguments, and ours.

registry.py -> [TRL] -> settings/other_names.py
"""

from collections.abc import Mapping

from swarmnode.settings.other_names import OtherNames

_SETTINGS: Mapping[str, tuple[str, str]] = {
    "num_generations": ("rollout.group_size", ""),
    "generation_batch_size": ("rollout.groups", "counted in groups: groups x group_size answers a round"),
    "steps_per_generation": ("rollout.groups", "a round's answers over training.sequences_per_step"),
    "per_device_train_batch_size": (
        "training.sequences_per_step",
        "counts completions, whatever fits in memory at once: that is training.micro_batch_tokens",
    ),
    "gradient_accumulation_steps": ("training.micro_batch_tokens", "it follows from free memory by itself"),
    "max_completion_length": ("rollout.max_tokens", ""),
    "max_prompt_length": ("rollout.max_prompt_tokens", "longer prompts are left out, not cut"),
    "temperature": ("rollout.temperature", ""),
    "top_p": ("rollout.top_p", ""),
    "learning_rate": ("training.learning_rate", "the default is 1e-4, for LoRA"),
    "lr": ("training.learning_rate", ""),
    "max_grad_norm": ("training.grad_clip", ""),
    "beta": ("training.kl_coef", ""),
    "num_iterations": ("training.inner_epochs", ""),
    "lr_scheduler_type": ("training.schedule", "constant, linear or cosine"),
    "warmup_steps": ("training.warmup_rounds", "counted in rounds"),
    "reward_weights": ("tasks.reward_weights", ""),
    "report_to": ("node.monitors", "metrics.jsonl is always written"),
    "loss_type": ("training.loss", ""),
    "importance_sampling_level": ("training.loss", "sequence is the loss gspo"),
    "scale_rewards": ("training.loss", "without scaling it is dr_grpo"),
    "gradient_checkpointing": ("training.gradient_checkpointing", ""),
    "max_steps": ("node.rounds", "rounds= of sn.Node, --rounds of join; over all starts"),
    "num_train_epochs": ("node.rounds", "a stream of examples has no epochs"),
    "save_steps": ("node.checkpoint_every", "counted in rounds"),
    "save_total_limit": ("node.keep_checkpoints", ""),
    "eval_steps": ("node.eval_every", "counted in rounds"),
    "seed": ("node.seed", ""),
    "use_vllm": ("rollout.engine", "vllm, embedded or auto"),
    "model_name_or_path": ("policy.model", "model= of sn.Node, --model of join"),
    "bf16": ("policy.dtype", "bfloat16"),
    "load_in_4bit": ("policy.quantization", "nf4"),
    "chat_template_kwargs": ("policy.chat_template", ""),
    "r": ("policy.lora_rank", "of peft's LoraConfig"),
    "lora_r": ("policy.lora_rank", ""),
    "target_modules": ("policy.lora_targets", ""),
    "reward_funcs": ("tasks.reward", "functions: reward= of sn.Node"),
    "max_length": ("rollout.max_tokens", "of answers; rollout.max_prompt_tokens bounds the prompt"),
    "run_name": ("node.run", "run= of sn.Node, --run of join"),
    "dataset_name": ("tasks.names", "the first argument of sn.Node, --task of join: hf:OWNER/NAME"),
}

_WITHOUT: Mapping[str, str] = {
    "log_completions": "rollouts.jsonl in the run's folder has some of every round",
    "weight_decay": "the adapter has none; training.kl_coef keeps it near the base",
    "lora_dropout": "the adapter has none",
    "optim": "always AdamW",
    "sync_ref_model": "the reference of training.kl_coef is the base model",
    "remove_unused_columns": "rewards get every column",
    "shuffle_dataset": "each seed asks the rows in another order; node.seed fixes it",
    "push_to_hub": "none: `swarmnode export DIR` writes what `hf upload` takes",
    "mask_truncated_completions": "TRL's get_soft_overlong_punishment is a reward, and tasks.reward takes it",
    "resume_from_checkpoint": "the same call goes on with its run by itself; run=NAME chooses one",
    "deepspeed": "a model that is too large for one machine is split over several: `join --pipeline NAME`",
    "epsilon": "each loss has its own clip, dapo 0.2 and 0.28; one of yours may have another",
    "epsilon_high": "each loss has its clip, as with epsilon",
    "delta": "the ratio is clipped by the clip of the loss alone",
    "vllm_mode": "the engine runs beside the trainer by itself; rollout.engine chooses it",
    "repetition_penalty": "none: training needs the probabilities that the policy itself gives",
    "vllm_importance_sampling_correction": "always: tokens of another version are weighted by TIS",
    "max_tool_calling_iterations": "an environment says it, most_turns = 16; its methods are tools",
    "top_k": "none: rollout.top_p and rollout.temperature shape the sampling",
    "min_p": "none: rollout.top_p and rollout.temperature shape the sampling",
}

_ARGUMENTS: Mapping[str, str] = {
    "train_dataset": "the first argument, task=: sn.Node(rows, reward=f)",
    "reward_funcs": "reward=, one function or a list of them",
    "args": "settings={'section.name': value}, and rounds=, home=, run=",
    "processing_class": "tokenizer=, beside model= where that is a loaded model",
    "peft_config": "settings={'policy.lora_rank': 16, 'policy.lora_alpha': 32}: LoRA is the default",
    "output_dir": "home=, a folder for everything that is kept; `swarmnode export` writes an adapter",
    "logging_steps": "nothing: every round is logged, and on_round= or monitors= are told",
    "callbacks": "on_round=, or monitors=",
    "trackers": "monitors=, such as monitors=['tensorboard']",
    "environment_factory": "environment=",
}

TRL = OtherNames(
    "TRL",
    _SETTINGS,
    _WITHOUT,
    _ARGUMENTS,
    page="""## Coming from TRL

An unknown setting that has one of these names is answered with ours. The objects that a GRPOTrainer takes are
arguments of `sn.Node`: [docs/library.md](library.md).

| TRL | here | |
|---|---|---|
""",
)
