"""The forward passes that all policies on one base share while they train: model, layout and batch sizes.

samples -> [Forward] -> packing.py (micro-batches), lora_patch.py (whose token it is)
        -> [completion_logprobs] -> log-probability and entropy of every completion token -> trainer.py

This module has everything that depends on the model's family: where its hidden states come from, and what
turns them into logits. The arithmetic behind that is in `model/head.py`.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.errors import ModelError
from swarmnode.model.adapters.lora_patch import RoutedTokens
from swarmnode.model.base_model import enable_checkpointing
from swarmnode.model.budget import TokenBudget, is_out_of_memory, smaller, token_budget
from swarmnode.model.dense_patch import read_arguments
from swarmnode.model.head import TokenLogprobs, head_logprobs, logits_logprobs
from swarmnode.model.packable import prepare_for_packing
from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.packing import MicroBatch, TrainingSample, micro_batches

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
SAME_LOGITS = 1e-4
SAME_LOGITS_HALF = 2e-2
"""The largest relative difference at which two ways to the logits count as equal; bf16 rounds at 0.004 per
layer."""


class Forward:
    """The forward passes of training. The model stays in eval mode: with dropout, two passes over the same
    tokens would be two different policies."""

    def __init__(
        self,
        policy: Policy,
        config: TrainingConfig,
        *,
        temperature: float,
        top_p: float = 1.0,
        budget: TokenBudget | None = None,
        before_a_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """`temperature` and `top_p`: the sampler's. `budget`: the micro-batch that fits; None: as set in
        `config`, or a default. `before_a_batch`: called before each micro-batch; it may block."""
        self._before_a_batch = before_a_batch
        self.temperature = temperature
        self.top_p = top_p
        self._peft_model = policy.peft_model
        self._model = policy.model
        self._device = policy.device
        self.alone = threading.Lock()
        """Held while the model is used: the active adapter is a state of the model, and each policy on the
        base has its own thread."""
        self._policies: dict[int, Policy] = {}
        self._head = head_of(self._model)
        self._fused = policy.fuse()
        self._packed = self._can_pack()
        self.budget = budget or _as_set(config, self._device)
        """The current micro-batch budget."""
        if self.budget.checkpointing:
            self._recompute_layers()
        self.add(policy)

    def add(self, policy: Policy) -> None:
        """Adds a policy on the same base."""
        if policy.peft_model is not self._peft_model:
            raise ModelError("policies that train together must share one loaded base model")
        self._policies[policy.number] = policy
        self._wake(self._policies.values())
        # One policy needs no route: PEFT's active adapter takes all tokens, even if a layer sees others.
        mixes = len(self._policies) > 1 and self._fused.covers_all
        self._route = self._fused.route if mixes else None

    @property
    def mixes_policies(self) -> bool:
        """True if one batch may hold tokens of several policies."""
        return self._route is not None

    def batches(self, samples: Sequence[TrainingSample], *, apart: bool = False) -> Iterator[MicroBatch]:
        """Yields the samples in micro-batches that fit into memory. `apart`: for use with the method
        `apart`."""
        if self._tells_apart if apart else self.mixes_policies:
            yield from self._batches(samples)
            return
        by_policy = sorted(samples, key=lambda sample: sample.policy)
        for _, one in groupby(by_policy, key=lambda sample: sample.policy):
            yield from self._batches(list(one))

    @contextmanager
    def apart(self, batch: MicroBatch, policy: Policy) -> Iterator[list[dict[Tensor, Tensor]]]:
        """Runs forward passes within the block with this policy alone; the samples' policy numbers name lists
        of samples here. Yields, for each number in the batch, a map from parameters to the tensors that this
        list's tokens use in their place: their gradients are those of that list."""
        if len(self._policies) > 1:
            self._peft_model.set_adapter(policy.adapter_name)
            self._wake(self._policies.values())
        if not self._tells_apart:
            yield [{parameter: parameter for parameter in policy.parameters}]
            return
        with self._fused.apart([tokens for _, tokens in batch.tokens_of_policies]) as copies:
            yield copies

    @contextmanager
    def policies_of(self, batch: MicroBatch) -> Iterator[None]:
        """Runs forward and backward passes within the block with each token's own policy."""
        names = [(self._policies[number].adapter_name, tokens) for number, tokens in batch.tokens_of_policies]
        if self._route is not None:
            with self._route([RoutedTokens(name, tokens) for name, tokens in names]):
                yield
            return
        if len(self._policies) > 1:
            self._peft_model.set_adapter(names[0][0])
        yield

    def logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        """Returns the log-probability and entropy of every completion token. Call it inside `policies_of`."""
        return completion_logprobs(self._model, batch, self.temperature, head=self._head, top_p=self.top_p)

    @torch.no_grad()
    def distributions(self, batch: MicroBatch) -> Callable[[Tensor], Tensor]:
        """Runs one forward pass and returns a function from R of the batch's N completion tokens to the
        log-probabilities [R, V] of all tokens there, at the sampler's temperature and over the whole
        vocabulary. Call it inside `policies_of`; the returned function may be called outside, and has no
        gradient."""
        logits_at = completion_logits(self._model, batch, head=self._head)

        @torch.no_grad()
        def at(places_R: Tensor) -> Tensor:
            return logits_at(places_R).float().div_(self.temperature).log_softmax(-1)

        return at

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        """Returns `logprobs` under the base model, without any adapter."""
        if self._route is not None:
            with self._route([RoutedTokens(None, batch.input_ids_BT.numel())]):
                return self.logprobs(batch)
        with self._peft_model.disable_adapter():
            found = self.logprobs(batch)
        # Re-enabling the layers leaves gradients to the active adapter alone.
        self._wake(self._policies.values())
        return found

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of one micro-batch at present."""
        return self.budget.tokens

    def until_it_fits(self, longest_sequence: int) -> Iterator["MemoryGuard"]:
        """Repeats work that may run out of memory, in smaller and smaller micro-batches.

        The work starts from scratch each time, in a function of its own, so that its tensors are freed when
        it has failed:

            for guard in forward.until_it_fits(longest_sequence):
                with guard:
                    work()

        `longest_sequence` is the work's longest, in tokens: no micro-batch can be smaller. Raises ModelError
        if even the smallest micro-batch does not fit.
        """
        guard = MemoryGuard(partial(self._shrink, longest_sequence))
        yield guard
        while guard.ran_out:
            # Outside of the guard: the failed tensors live as long as their traceback.
            self.release_memory()
            yield guard

    def release_memory(self) -> None:
        """Returns memory that torch caches to the card."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _tells_apart(self) -> bool:
        """True if one pass can keep the gradients of several lists of samples apart."""
        return self._fused.covers_all and not self.budget.checkpointing

    def _shrink(self, longest_sequence: int, error: BaseException) -> None:
        budget = smaller(self.budget, longest_sequence)
        if budget is None:
            raise ModelError(
                "out of memory with the smallest micro-batch",
                hint="lower rollout.max_tokens or rollout.max_prompt_tokens, use a smaller --model or"
                " --set policy.quantization=nf4, or share this one with others: --pipeline NAME",
            ) from error
        logger.warning("out of memory: repeating the step with %s", budget.reason)
        if budget.checkpointing and not self.budget.checkpointing:
            self._recompute_layers()
        self.budget = budget

    def _recompute_layers(self) -> None:
        if not enable_checkpointing(self._model):
            logger.warning("this model has no layers that can be recomputed in the backward pass")

    def _batches(self, samples: Sequence[TrainingSample]) -> Iterator[MicroBatch]:
        by_onednn = self._device.type == "cpu" and self._model.dtype is torch.bfloat16
        for batch in micro_batches(
            samples, self.budget.tokens, self._device, packed=self._packed, round_up=by_onednn
        ):
            self._before_a_batch()
            yield batch

    def _can_pack(self) -> bool:
        if (reason := prepare_for_packing(self._model)) is None:
            return True
        logger.info("sequences are padded instead of packed: %s", reason)
        return False

    @staticmethod
    def _wake(policies: Iterable[Policy]) -> None:
        for policy in policies:
            policy.wake()


class MemoryGuard:
    """A `with` block that suppresses running out of memory, after micro-batches were made smaller."""

    def __init__(self, shrink: Callable[[BaseException], None]) -> None:
        """`shrink` makes the next block need less memory, or raises if it cannot."""
        self._shrink = shrink
        self.ran_out = False
        """True if the last block ended because memory ran out."""

    def __enter__(self) -> None:
        self.ran_out = False

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if error is not None and is_out_of_memory(error):
            self._shrink(error)
            self.ran_out = True
        return self.ran_out


def _as_set(config: TrainingConfig, device: torch.device) -> TokenBudget:
    """Returns the budget for when nobody measured the memory."""
    return token_budget(
        None,
        None,
        longest_sequence=1,
        device=device.type,
        wanted=config.micro_batch_tokens,
        checkpointing=config.gradient_checkpointing,
    )


# ---- from the model to log-probabilities ----


def completion_logprobs(
    model: Any,
    batch: MicroBatch,
    temperature: float = 1.0,
    *,
    head: nn.Module | None,
    top_p: float = 1.0,
) -> TokenLogprobs:
    """Returns the log-probabilities of the N completion tokens of a batch and the entropies there, float32,
    in its order.

    `model` is a causal LM of transformers, with or without injected LoRA layers. `temperature` and `top_p`
    are those the tokens were sampled with. With a `head` (see `head_of`), only positions that predict
    completion tokens pass through it, in chunks; without one, the model's own forward builds the whole [B, T,
    vocabulary].
    """
    if head is not None:
        hidden_ND = _predicting(model, batch)
        return head_logprobs(head, hidden_ND, batch.targets_N, temperature, top_p=top_p)
    logits_NV = model(**batch.forward_arguments()).logits.flatten(0, 1)[batch.predictors_N]
    return logits_logprobs(logits_NV, batch.targets_N, temperature, top_p=top_p)


def completion_logits(model: Any, batch: MicroBatch, *, head: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """Runs one forward pass and returns a function to the logits [R, V] at R of the N places that predict
    completion tokens. With a `head`, logits are computed on request: ask for few at once."""
    if head is not None:
        hidden_ND = _predicting(model, batch)
        return lambda places_R: head(hidden_ND[places_R])
    logits_NV = model(**batch.forward_arguments()).logits.flatten(0, 1)[batch.predictors_N]
    return lambda places_R: logits_NV[places_R]


def _predicting(model: Any, batch: MicroBatch) -> Tensor:
    """Returns the decoder's output [N, D] at the places that predict completion tokens."""
    read_R, number_N = batch.predictors_N.unique(return_inverse=True)
    arguments = batch.forward_arguments() | read_arguments(model, read_R)
    hidden_MD = model.base_model(**arguments).last_hidden_state.flatten(0, 1)
    return hidden_MD[batch.predictors_N if len(hidden_MD) > len(read_R) else number_N]


def head_of(model: Any) -> nn.Module | None:
    """Returns the module that turns the decoder's output into logits, so that they can be made in chunks.

    For most families it is the head itself; some multiply, divide or cap its logits, and name the number in
    their config. None: neither gives the model's logits, so only its whole forward does. The config's numbers
    are tried against the model: a small cap does not show where logits are small, so both have to agree.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    found = ScaledHead(head, *_adjustments(config)) if _adjustments(config) != (1.0, None) else head
    ids_BT = torch.arange(1, 1 + PROBE_TOKENS, device=model.device)[None]
    with torch.no_grad():
        short = found(model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state).double()
        full = model(input_ids=ids_BT, use_cache=False).logits.double()
    allowed = SAME_LOGITS if model.dtype in (torch.float32, torch.float64) else SAME_LOGITS_HALF
    return found if bool((short - full).abs().max() <= allowed * full.abs().max()) else None


class ScaledHead(nn.Module):
    """A head whose logits are multiplied, then squashed into (-cap, cap) by cap * tanh(z / cap)."""

    def __init__(self, head: nn.Module, multiplier: float, cap: float | None) -> None:
        super().__init__()
        self._head = head
        self._multiplier = multiplier
        self._cap = cap

    def forward(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self._head(hidden_ND) * self._multiplier
        return logits_NV if self._cap is None else (logits_NV / self._cap).tanh() * self._cap


def _adjustments(config: Any) -> tuple[float, float | None]:
    """Returns factor and cap of the logits, by the names that transformers' families use for them."""
    values = config.to_dict()
    multiplier = float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)
    cap = values.get("final_logit_softcapping")
    return multiplier, None if cap is None else float(cap)
