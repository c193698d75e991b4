"""The engine for every other causal LM: the model's own forward, one static batch at a time.

select.py -> [fallback] <- collector.py
                 |
                 +-> model(...) -> sampler.py -> Output

What it gives up against embedded.py: the next batch starts when the last sequence of this one has ended, and
each sequence pays for its own prompt. Seeds, log-probabilities, abort and exact policies stay.
"""

import copy
import inspect
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmnode.errors import EngineError, ModelError
from swarmnode.rollout.adapter import lora_pairs
from swarmnode.rollout.engine import EngineStats, Output, PolicyUpdate, Request
from swarmnode.rollout.requests import RequestQueue, untouched
from swarmnode.rollout.sampler import Sampler
from swarmnode.rollout.stops import StopTokens
from swarmnode.types import FinishReason


class GenerateEngine:
    """An `Engine` for any causal LM of transformers. It owns a copy of the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_slots: int = 64,
        max_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._model: Any = _own_copy(model, device)
        self._inputs = frozenset(inspect.signature(self._model.forward).parameters)
        self._base: dict[str, Tensor] = {}
        vocab = self._model.get_input_embeddings().weight.shape[0]
        head = self._model.get_output_embeddings()
        self._sampler = Sampler(head.weight.shape[0], max_slots, self._model.device)
        self._stops = StopTokens(eos_token_ids, max_slots, self._model.device)
        self._max_slots = max_slots
        self._queue = RequestQueue(_max_length(self._model) if max_length is None else max_length, vocab)
        self._batch: _Batch | None = None
        self._policy_version = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._generation_s = 0.0

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def submit(self, requests: Iterable[Request]) -> None:
        self._queue.submit(requests)

    @torch.inference_mode()
    def step(self) -> Sequence[Output]:
        started = time.perf_counter()
        if self._batch is None:
            self._batch = self._next_batch()
            if self._batch is None:
                return ()
        batch = self._batch
        tokens, logprobs = self._sampler.sample(batch.next_logits(self._model, self._inputs))
        batch.append(tokens, logprobs)
        self._generated_tokens += len(batch.running)
        outputs = self._finish(batch, batch.ended(self._stops.hit(tokens)))
        self._generation_s += time.perf_counter() - started
        return outputs

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str] | None = None) -> Sequence[Output]:
        chosen = None if request_ids is None else set(request_ids)
        outputs = [untouched(request, self._policy_version) for request in self._queue.withdraw(chosen)]
        if self._batch is None:
            return outputs
        rows: dict[int, FinishReason] = {
            row: "abort"
            for row, request in self._batch.running.items()
            if chosen is None or request.request_id in chosen
        }
        return [*self._finish(self._batch, rows), *outputs]

    @torch.inference_mode()
    def set_policy(self, update: PolicyUpdate) -> None:
        self._queue.refuse_update(update)
        modules = _lora_modules(self._model)
        pairs = lora_pairs(update, {name: _out_in(module) for name, module in modules.items()})
        for name in {*pairs, *self._base}:
            weight = modules[name].weight
            base = self._base.setdefault(name, weight.clone())
            weight.copy_(base)
            if name in pairs:
                delta = pairs[name].delta().to(weight.device)
                weight.copy_(base.float() + (delta.T if isinstance(modules[name], Conv1D) else delta))
        self._policy_version = update.version

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._batch.running) if self._batch else 0,
            waiting=len(self._queue),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            generation_s=self._generation_s,
        )

    def _next_batch(self) -> "_Batch | None":
        # Without positions a model cannot tell padding from text, so its prompts must have one length.
        take = self._queue.take if "position_ids" in self._inputs else self._queue.take_alike
        requests = take(self._max_slots)
        if not requests:
            return None
        rows = torch.arange(len(requests), device=self._model.device)
        sampling = [request.sampling for request in requests]
        self._sampler.reset()
        self._sampler.write(rows, sampling, [len(request.prompt_ids) for request in requests])
        self._stops.write(rows, sampling)
        self._prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        return _Batch(requests, self._model.device)

    def _finish(self, batch: "_Batch", ended: Mapping[int, FinishReason]) -> list[Output]:
        if not ended:
            return []
        outputs = batch.outputs(ended, self._policy_version)
        for row in ended:
            self._queue.close(batch.running.pop(row).request_id)
        if not batch.running:
            self._batch = None
        if not all(math.isfinite(sum(output.logprobs)) for output in outputs):
            self.abort()
            raise EngineError(
                f"policy {self._policy_version} gives NaN as probabilities; all requests are dropped",
                hint="move the newest checkpoint away, start again, and lower the learning rate",
            )
        return outputs


class _Batch:
    """Sequences that started together. Rows that ended are computed on until all have."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.running = dict(enumerate(requests))
        width = max(len(request.prompt_ids) for request in requests)
        padding = [width - len(request.prompt_ids) for request in requests]
        padded = [(0,) * pad + request.prompt_ids for pad, request in zip(padding, requests, strict=True)]
        self._tokens = torch.tensor(padded, device=device)
        self._padding = torch.tensor(padding, device=device)[:, None]
        self._prompt_width = width
        self._logprobs: list[Tensor] = []
        self._cache: Any = None

    def next_logits(self, model: PreTrainedModel, inputs: frozenset[str]) -> Tensor:
        """Logits [rows, vocab] after the newest tokens."""
        width = self._tokens.shape[1]
        # A model without a cache of this kind (a recurrent one) reads the whole text again.
        known = width - 1 if self._cache is not None else 0
        columns = torch.arange(width, device=self._tokens.device)
        arguments = {
            "attention_mask": (columns >= self._padding).long(),
            "position_ids": (columns - self._padding).clamp_(min=0)[:, known:],
            "past_key_values": self._cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        accepted = {name: value for name, value in arguments.items() if name in inputs}
        result = model(input_ids=self._tokens[:, known:], **accepted)
        self._cache = result.get("past_key_values")
        return result.logits[:, -1].float()

    def append(self, tokens: Tensor, logprobs: Tensor) -> None:
        self._tokens = torch.cat([self._tokens, tokens[:, None]], dim=1)
        self._logprobs.append(logprobs)

    def ended(self, stopped: Iterable[int]) -> dict[int, FinishReason]:
        ended: dict[int, FinishReason] = {row: "stop" for row in stopped if row in self.running}
        for row, request in self.running.items():
            if len(self._logprobs) >= request.sampling.max_tokens:
                ended.setdefault(row, "length")
        return ended

    def outputs(self, ended: Mapping[int, FinishReason], version: int) -> list[Output]:
        rows = list(ended)
        tokens = self._tokens[rows, self._prompt_width :].tolist()
        logprobs = torch.stack(self._logprobs, dim=1)[rows].tolist()
        return [
            Output(self.running[row].request_id, tuple(row_tokens), tuple(row_logprobs), version, ended[row])
            for row, row_tokens, row_logprobs in zip(rows, tokens, logprobs, strict=True)
        ]


def _own_copy(model: PreTrainedModel, device: torch.device | str | None) -> PreTrainedModel:
    """A copy without the LoRA layers that PEFT may have put into the model."""
    own: Any = copy.deepcopy(model)
    for name, module in list(own.named_modules()):
        if isinstance(module, BaseTunerLayer):
            own.set_submodule(name, module.get_base_layer())
    return own.to(own.device if device is None else device).eval().requires_grad_(False)


def _max_length(model: PreTrainedModel) -> int:
    try:
        return model.config.get_text_config().max_position_embeddings
    except AttributeError:
        raise ModelError("this model states no maximum length", hint="set max_length") from None


def _lora_modules(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Modules whose weight a policy may change. Not the head: it may be the embedding as well."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _out_in(module: nn.Linear | Conv1D) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
