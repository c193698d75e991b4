"""What all policies on one base share while they train: the model, how batches are laid out, and their size.

packing, lora_patch, logprob -> [forward] -> step.py
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from swarmnode.config import TrainingConfig
from swarmnode.errors import ModelError
from swarmnode.model.base_model import enable_checkpointing
from swarmnode.model.budget import TokenBudget, is_out_of_memory, smaller, token_budget
from swarmnode.model.head import TokenLogprobs
from swarmnode.model.lora import LoraGemm
from swarmnode.model.lora_patch import RoutedTokens
from swarmnode.model.packable import prepare_for_packing
from swarmnode.model.policy import Policy
from swarmnode.training.logprob import completion_logits, completion_logprobs, head_of
from swarmnode.training.packing import MicroBatch, TrainingSample, micro_batches

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


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
        kernel: LoraGemm | None = None,
    ) -> None:
        """`temperature` and `top_p` are those of the sampler. `budget`: the micro-batch that fits; None: as
        set, or a default. `kernel`: what may be faster than two plain products, where it says so."""
        self.temperature = temperature
        self.top_p = top_p
        self._peft_model = policy.peft_model
        self._model = policy.model
        self._device = policy.device
        self._turn = threading.Lock()
        self._policies: dict[int, Policy] = {}
        self._head = head_of(self._model)
        self._fused = None if config.lora == "peft" else policy.fuse(kernel)
        self._packed = config.packing == "auto" and self._can_pack()
        self._budget = budget or _as_set(config, self._device)
        if self._budget.checkpointing:
            self._recompute_layers()
        self.add(policy)

    def add(self, policy: Policy) -> None:
        """One more policy on the same base."""
        if policy.peft_model is not self._peft_model:
            raise ModelError("policies that train together must stand on one loaded base model")
        self._policies[policy.number] = policy
        self._wake(self._policies.values())
        # One policy needs no route: PEFT's active adapter takes all tokens, also where a layer sees others.
        mixes = len(self._policies) > 1 and self._fused is not None and self._fused.covers_all
        self._route = self._fused.route if mixes and self._fused is not None else None

    @property
    def mixes_policies(self) -> bool:
        """Whether tokens of several policies may stand in one batch."""
        return self._route is not None

    def batches(self, samples: Sequence[TrainingSample]) -> Iterator[MicroBatch]:
        """The samples in micro-batches that fit into memory."""
        if self.mixes_policies:
            yield from self._batches(samples)
            return
        by_policy = sorted(samples, key=lambda sample: sample.policy)
        for _, one in groupby(by_policy, key=lambda sample: sample.policy):
            yield from self._batches(list(one))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one who uses the model, for the length of a `with` block: which adapter is at work is
        a state of the model, and the policies on one base have a thread each."""
        with self._turn:
            yield

    @contextmanager
    def policies_of(self, batch: MicroBatch) -> Iterator[None]:
        """Forward and backward in here are those of each token's own policy."""
        names = [(self._policies[number].adapter_name, tokens) for number, tokens in batch.tokens_of_policies]
        if self._route is not None:
            with self._route([RoutedTokens(name, tokens) for name, tokens in names]):
                yield
            return
        if len(self._policies) > 1:
            self._peft_model.set_adapter(names[0][0])
        yield

    def logprobs(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenLogprobs:
        """Log-probabilities and entropies of every completion token. Called inside `policies_of`."""
        return completion_logprobs(
            self._model,
            batch,
            self.temperature,
            head=self._head,
            top_p=self.top_p,
            entropy_gradient=entropy_gradient,
        )

    @torch.no_grad()
    def distributions(self, batch: MicroBatch) -> Callable[[Tensor], Tensor]:
        """A function to the log-probabilities [R, V] of all tokens at R of the batch's N completion tokens,
        at the sampler's temperature and over the whole vocabulary; one forward pass is taken now. Called
        inside `policies_of`; what it returns may be called outside, and has no gradient."""
        logits_at = completion_logits(self._model, batch, head=self._head)

        @torch.no_grad()
        def at(places_R: Tensor) -> Tensor:
            return logits_at(places_R).float().div_(self.temperature).log_softmax(-1)

        return at

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        """`logprobs` under the base model, without any adapter."""
        if self._route is not None:
            with self._route([RoutedTokens(None, batch.input_ids_BT.numel())]):
                return self.logprobs(batch)
        with self._peft_model.disable_adapter():
            found = self.logprobs(batch)
        # Switching the layers on again leaves gradients to the active adapter alone.
        self._wake(self._policies.values())
        return found

    @property
    def budget(self) -> TokenBudget:
        """The micro-batch, as of now."""
        return self._budget

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of one micro-batch, as of now."""
        return self._budget.tokens

    def with_memory_to_spare(
        self, work: Callable[[], Result], undo: Callable[[], None], longest_sequence: int
    ) -> Result:
        """Do the work; out of memory, undo it, make micro-batches smaller and do it again from its start.

        `longest_sequence` is that of the work, in tokens: no micro-batch can be smaller. Raises ModelError
        when nothing is left to try.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                undo()
                self._shrink(error, longest_sequence)
            # Outside of `except`: what failed is alive as long as its traceback is.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _shrink(self, error: BaseException, longest_sequence: int) -> None:
        budget = smaller(self._budget, longest_sequence)
        if budget is None:
            raise ModelError(
                "out of memory with the smallest micro-batch",
                hint="use a smaller --model or --set rollout.max_tokens=...",
            ) from error
        logger.warning("out of memory: the step is repeated with %s", budget.reason)
        if budget.checkpointing and not self._budget.checkpointing:
            self._recompute_layers()
        self._budget = budget

    def _recompute_layers(self) -> None:
        if not enable_checkpointing(self._model):
            logger.warning("this model has no layers that could be computed again in the backward pass")

    def _batches(self, samples: Sequence[TrainingSample]) -> Iterator[MicroBatch]:
        by_onednn = self._device.type == "cpu" and self._model.dtype is torch.bfloat16
        return micro_batches(
            samples, self._budget.tokens, self._device, packed=self._packed, round_up=by_onednn
        )

    def _can_pack(self) -> bool:
        if (reason := prepare_for_packing(self._model)) is None:
            return True
        logger.info("sequences are padded instead of packed: %s", reason)
        return False

    @staticmethod
    def _wake(policies: Iterable[Policy]) -> None:
        for policy in policies:
            policy.wake()


def _as_set(config: TrainingConfig, device: torch.device) -> TokenBudget:
    """The budget where nobody looked at the memory."""
    return token_budget(
        None,
        None,
        longest_sequence=1,
        device=device.type,
        wanted=config.micro_batch_tokens,
        checkpointing=config.gradient_checkpointing,
    )
