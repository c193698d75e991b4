"""The engine for every other causal LM: the model's own forward, one static batch at a time.

generate_record.py -> [GenerateEngine] <- rollout/decode/torch_engine.py <- schedule/partial_rollouts.py
                       |
                       +-> model_lora.py (a policy on the model)
                       +-> model(...) -> rollout/decode/sampler.py -> Output

What it gives up against embedded.py: the next batch starts when the last sequence of this one has ended, each
sequence pays for its own prompt, and for all of it again in every turn of a conversation, and there is one
policy at a time, so no version can be pinned. Seeds, log-probabilities, abort and resume stay exact.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.extensions.generate.model_lora import own_model
from swarmnode.rollout.decode.adapters.adapter import lora_pairs
from swarmnode.rollout.decode.running_rows import DecodePolicy
from swarmnode.rollout.decode.torch_engine import LoraPairs, OnePolicyEngine
from swarmnode.rollout.decode.weights import Layers, longest_sequence
from swarmnode.rollout.engine import BASE_VERSION, Capabilities, Output, PolicyUpdate, Request


class GenerateEngine(OnePolicyEngine):
    """An `Engine` for any causal LM of transformers. It owns a copy of the model, but shares the weights of a
    quantized one."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_slots: int = 64,
        max_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        # Both are None once it is closed.
        self._model: Any
        self._lora: Any
        self._model, self._lora = own_model(model, device)
        self._inputs = frozenset(inspect.signature(self._model.forward).parameters)
        self._batch: _Batch | None = None
        capabilities = Capabilities(
            name="generate",
            inflight=frozenset({"keep", "recompute"}),
            max_versions=1,
            max_running=max_slots,
            max_length=longest_sequence(self._model) if max_length is None else max_length,
            exact_resume=True,
        )
        super().__init__(
            capabilities,
            eos_token_ids,
            vocab=self._model.get_output_embeddings().weight.shape[0],
            newest=DecodePolicy(0, [], is_base=True),
            device=self._model.device,
            prompt_vocab=self._model.get_input_embeddings().weight.shape[0],
        )

    def close(self) -> None:
        super().close()
        self._model = self._lora = None

    # One step

    @property
    def _tick(self) -> int:
        return 0 if self._batch is None else self._batch.tick

    def _step(self) -> Sequence[Output]:
        if self._batch is None:
            self._batch = self._next_batch()
        tokens, logprobs = self._sampler.sample(self._batch.next_logits(self._model, self._inputs))
        self._batch.append(tokens, logprobs)
        self._counters.generated_tokens += len(self._running)
        return self._finish(self._ended(tokens))

    def _next_batch(self) -> "_Batch":
        count = self.capabilities.max_running
        if not self._may_pad:
            lengths = [len(_known_ids(request)) for request in self._queue.waiting[:count]]
            count = next((at for at, length in enumerate(lengths) if length != lengths[0]), count)
        requests = self._queue.take(count)
        self._start(range(len(requests)), requests)
        return _Batch([_known_ids(request) for request in requests], self._device)

    @property
    def _may_pad(self) -> bool:
        """Returns True if the model takes positions: without them it cannot tell padding from text."""
        return "position_ids" in self._inputs

    # Rows

    def _harvest(self, rows: Sequence[int], since: int) -> tuple[list[list[int]], list[list[float]]]:
        # All rows of a batch started together, at its first tick.
        assert self._batch is not None
        return self._batch.sampled(rows)

    def _release(self, rows: Sequence[int]) -> None:
        if not self._running:
            self._batch = None

    def _clear(self) -> None:
        self._batch = None

    # Policies

    def _pairs(self, update: PolicyUpdate) -> LoraPairs:
        return lora_pairs(update, self._lora.shapes())

    def _merge(self, pairs: LoraPairs, former: Layers | None) -> Layers:
        self._lora.take(pairs)
        return []

    def _base(self) -> DecodePolicy:
        if not self._newest.is_base:
            raise EngineError(
                f"the model carries policy {self._newest.version}, so its base cannot be sampled from",
                hint="update to a policy without tensors first",
            )
        return DecodePolicy(BASE_VERSION, [], is_base=True)


def _known_ids(request: Request) -> tuple[int, ...]:
    return request.prompt_ids + request.sampled.token_ids


class _Batch:
    """Sequences that started together. Ended rows are computed on until all have ended."""

    def __init__(self, sequences: Sequence[Sequence[int]], device: torch.device) -> None:
        width = max(map(len, sequences))
        padding = [width - len(ids) for ids in sequences]
        padded = [(*[0] * pad, *ids) for pad, ids in zip(padding, sequences, strict=True)]
        self._tokens = torch.tensor(padded, device=device)
        self._padding = torch.tensor(padding, device=device)[:, None]
        self._start = width
        self._logprobs: list[Tensor] = []
        self._cache: Any = None

    @property
    def tick(self) -> int:
        """Number of tokens that each row has sampled."""
        return len(self._logprobs)

    def next_logits(self, model: Any, inputs: frozenset[str]) -> Tensor:
        """Returns the logits [rows, vocab] after the newest tokens."""
        # A model without a cache of this kind (a recurrent one) reads the whole text again.
        known = self._tokens.shape[1] - 1 if self._cache is not None else 0
        extra = {"past_key_values": self._cache, "use_cache": True, "logits_to_keep": 1}
        result = self._forward(model, inputs, known, extra)
        self._cache = result.get("past_key_values")
        return result.logits[:, -1].float()

    def append(self, tokens: Tensor, logprobs: Tensor) -> None:
        self._tokens = torch.cat([self._tokens, tokens[:, None]], dim=1)
        self._logprobs.append(logprobs)

    def sampled(self, rows: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
        """Returns tokens and log-probabilities of `rows` since the batch started."""
        chosen = list(rows)
        logprobs = torch.stack(self._logprobs, dim=1)[chosen]
        return self._tokens[chosen, self._start :].tolist(), logprobs.tolist()

    def _forward(self, model: Any, inputs: frozenset[str], known: int, extra: dict[str, Any]) -> Any:
        columns = torch.arange(self._tokens.shape[1], device=self._tokens.device)
        arguments = {
            "attention_mask": (columns >= self._padding).long(),
            "position_ids": (columns - self._padding).clamp_(min=0)[:, known:],
            **extra,
        }
        accepted = {name: value for name, value in arguments.items() if name in inputs}
        return model(input_ids=self._tokens[:, known:], **accepted)
