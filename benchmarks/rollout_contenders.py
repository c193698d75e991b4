"""Everything that can sample completions here, behind one method: sample these lengths from these prompts.

benchmarks/rollout.py -> [rollout_contenders] -> our engines | stock vLLM | transformers
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from swarmnode.rollout.engine import Engine, Request, SamplingParams

Prompts = Sequence[tuple[int, ...]]

KV_BYTES = 256 << 20
"""Room for keys and values in vLLM: more than any of this needs."""


class Contender(Protocol):
    def sample(self, prompts: Prompts, lengths: Sequence[int]) -> None:
        """One completion per prompt, at temperature 1, of exactly this length."""
        ...


class Ours:
    """Any `Engine` of this repository, with log-probabilities and spans."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def sample(self, prompts: Prompts, lengths: Sequence[int]) -> None:
        self._engine.submit(
            Request(str(number), prompt, SamplingParams(length, ignore_eos=True))
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        )
        left = len(prompts)
        while left:
            left -= len(self._engine.step())


class Generate:
    """`generate` of transformers: batches in which each row runs until the longest has ended."""

    def __init__(self, model: PreTrainedModel, batch: int) -> None:
        self._model = model
        self._batch = batch

    @torch.inference_mode()
    def sample(self, prompts: Prompts, lengths: Sequence[int]) -> None:
        for start in range(0, len(prompts), self._batch):
            ids = torch.tensor(prompts[start : start + self._batch])
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=max(lengths[start : start + self._batch]),
                eos_token_id=None,
                pad_token_id=0,
            )


class ContinuousBatching:
    """Continuous batching of transformers, with log-probabilities."""

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int) -> None:
        self._model = model
        page = 32
        self._batching = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=slots * (max_length // page + 1),
            max_batch_tokens=512,
            max_requests_per_batch=slots,
            use_cuda_graph=False,
            use_async_batching=False,
            return_logprobs=True,
        )
        self._generation = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        )

    def sample(self, prompts: Prompts, lengths: Sequence[int]) -> None:
        manager = self._model.init_continuous_batching(
            generation_config=self._generation, continuous_batching_config=self._batching
        )
        manager.start()
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(list(prompt), max_new_tokens=length)
        left = len(prompts)
        while left:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(f"continuous batching stopped with {left} requests left")
            left -= result.is_finished()
        manager.stop(block=True)


class StockVllm:
    """vLLM as it is installed: its own step loop, its own LoRA kernels."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        slots: int,
        max_length: int,
        *,
        adapter: Path | None = None,
        compiled: bool = False,
    ) -> None:
        """`compiled`: as vLLM comes, by torch.compile; else eager."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.llm_engine import LLMEngine

        from swarmnode.extensions.vllm.compat import starting_vllm

        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8} if adapter else {}
        with starting_vllm(in_process=True), _stock_lora_kernels():
            arguments: Any = EngineArgs(
                model=str(folder),
                dtype=dtype,
                max_model_len=max_length,
                max_num_seqs=slots,
                kv_cache_memory_bytes=KV_BYTES,
                enforce_eager=not compiled,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                logprobs_mode="processed_logprobs",
                **lora,
            )
            self._engine = LLMEngine.from_engine_args(arguments)
        self._adapter = LoRARequest("adapter", 1, str(adapter)) if adapter else None

    def sample(self, prompts: Prompts, lengths: Sequence[int]) -> None:
        from vllm import SamplingParams as VllmSampling
        from vllm import TokensPrompt

        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            sampling = VllmSampling(max_tokens=length, logprobs=0, ignore_eos=True, detokenize=False)
            prompt_ids = TokensPrompt(prompt_token_ids=list(prompt))
            self._engine.add_request(str(number), prompt_ids, sampling, lora_request=self._adapter)
        while self._engine.has_unfinished_requests():
            self._engine.step()


@contextmanager
def _stock_lora_kernels() -> Iterator[None]:
    """Without our repair, where an engine of ours has installed it already."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    ours = vars(platform)["get_punica_wrapper"]
    platform.get_punica_wrapper = classmethod(
        lambda cls: "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
    )
    try:
        yield
    finally:
        platform.get_punica_wrapper = ours
