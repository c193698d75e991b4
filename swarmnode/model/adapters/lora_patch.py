"""Runs the LoRA layers of a PEFT model on our arithmetic, and routes tokens of a batch to their adapters.

policy.py, trainer.py -> [lora_patch] -> lora.py (plain layers), PEFT's own forward (all others)

PEFT stays the container: names, files and switching are its own, and only `forward` of single modules is
replaced. A module is checked once: its adapters are those that `policy.lora_config` describes, without
dropout, bias or a variant, on the same modules for every policy, and never merged into a model that trains.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from swarmnode.errors import ModelError
from swarmnode.model.adapters.lora import LoraWeights, Segment, lora_linear, lora_linear_segments


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Adjacent tokens of a batch, flattened row after row, that go through one adapter."""

    adapter: str | None
    """PEFT's name of the adapter. None: the base model alone."""
    tokens: int


class FusedLora:
    """A PeftModel whose LoRA layers run on `lora.py` from its construction on.

    >>> fused = FusedLora(peft_model)                                         # doctest: +SKIP
    >>> with fused.route([RoutedTokens("default", 120), RoutedTokens("policy-1", 80), RoutedTokens(None, 8)]):
    ...     loss(peft_model, batch).backward()                                # doctest: +SKIP

    Without a route PEFT's active adapter takes all tokens.
    """

    def __init__(self, peft_model: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._current = _Current()
        adapted: list[Any] = [one for one in peft_model.modules() if isinstance(one, BaseTunerLayer)]
        plain = [module for module in adapted if _is_plain(module)]
        self.covers_all = plain == adapted
        """True if every adapted module runs on our arithmetic: only then can a batch mix adapters."""
        for module in plain:
            # On the instance, before its class's forward: names and state_dict are untouched.
            module.forward = _FusedLayer(module, self._current)

    @contextmanager
    def route(self, tokens: Sequence[RoutedTokens]) -> Iterator[None]:
        """Returns a context that sends each run of tokens through its adapter, in forward, backward and
        recomputation. Requires `covers_all`.

        The runs must add up to the tokens (B * T) of every input that reaches an adapter.
        `[RoutedTokens(None, n)]` gives the base model like `disable_adapter()`, which, however, freezes every
        adapter except the active one when it exits.

        An adapter is trained only while its parameters require gradients, and PEFT freezes all except the
        active one: call `peft_model.set_requires_grad(names)` before.
        """
        previous, self._current.route = self._current.route, _Route.of(tokens)
        try:
            yield
        finally:
            self._current.route = previous

    @contextmanager
    def apart(self, tokens: Sequence[int]) -> Iterator[list[dict[Tensor, Tensor]]]:
        """Returns a context in which each of these runs of tokens uses copies of the active adapter's
        weights, so that autograd keeps the gradients of the runs apart. Yields the copies per run, by the
        weight they copy, for the layers called so far. Requires `covers_all`, and no recomputation in the
        backward pass.

        >>> with fused.apart([120, 80]) as copies:                            # doctest: +SKIP
        ...     loss = loss_of(peft_model, batch)
        >>> torch.autograd.grad(loss, [*copies[0].values()])                  # doctest: +SKIP
        """
        starts = [0, *accumulate(tokens)]
        segments = tuple(Segment(*ends, number) for number, ends in enumerate(pairwise(starts)))
        self._current.apart = _Apart(segments, [{} for _ in segments])
        try:
            yield self._current.apart.copies
        finally:
            self._current.apart = None


@dataclass(slots=True)
class _Current:
    """The current route, shared by all layers. A plain object, because autograd recomputes checkpoints in a
    thread of its own, without our thread-local and context variables."""

    route: "_Route | None" = None
    apart: "_Apart | None" = None


@dataclass(frozen=True, slots=True)
class _Apart:
    segments: tuple[Segment, ...]
    copies: list[dict[Tensor, Tensor]]
    """Copies of every A and B per segment, by the weight they copy."""


@dataclass(frozen=True, slots=True)
class _Route:
    segments: tuple[Segment, ...]
    tokens: int
    adapters: tuple[str, ...]
    """Adapters that the segments index. Empty: the base has all tokens."""
    sole: str | None
    """The adapter that has all tokens. None: there are several, or none."""

    @classmethod
    def of(cls, routed: Sequence[RoutedTokens]) -> "_Route":
        runs = pairwise(accumulate((part.tokens for part in routed), initial=0))
        names = dict.fromkeys(part.adapter for part in routed if part.tokens)
        adapters = tuple(name for name in names if name is not None)
        segments = tuple(
            Segment(*run, adapters.index(part.adapter) if part.adapter in adapters else -1)
            for run, part in zip(runs, routed, strict=True)
        )
        return cls(segments, segments[-1].end, adapters, next(iter(names)) if len(names) == 1 else None)


class _FusedLayer:
    """Replaces the `forward` of one module; its class's stays available."""

    __slots__ = ("_current", "_module")

    def __init__(self, module: Any, current: _Current) -> None:
        self._module = module
        self._current = current

    def __call__(self, x: Tensor) -> Tensor:
        # Through `_modules`: on a fast card, attribute look-up by `nn.Module` takes noticeable time.
        base = self._module._modules["base_layer"]
        own = base._parameters
        sole = self.sole_adapter(x.numel() // x.shape[-1])
        if sole is not None:
            return lora_linear(x, own["weight"], own["bias"], sole)
        route, apart = self._current.route, self._current.apart
        if self._module.disable_adapters:
            return base(x)
        if apart is not None:
            return self._apart(x, apart)
        if route is None or not route.adapters:
            return base(x)
        adapters = [self._weights(name) for name in route.adapters]
        return lora_linear_segments(x, own["weight"], own["bias"], adapters, route.segments)

    def sole_adapter(self, tokens: int) -> LoraWeights | None:
        """Returns the adapter that takes all tokens, as the function `sole_adapter` does."""
        route = self._current.route
        if self._module.disable_adapters or self._current.apart is not None:
            return None
        if route is None:
            return self._weights(self._module.active_adapters[0])
        if tokens != route.tokens:
            raise ModelError(
                f"{route.tokens} tokens were routed, a layer got {tokens}",
                hint="route every token of the batch, padding too (None: the base alone)",
            )
        return None if route.sole is None else self._weights(route.sole)

    def _apart(self, x: Tensor, apart: _Apart) -> Tensor:
        own, base = self._weights(self._module.active_adapters[0]), self._module.base_layer
        adapters = list[LoraWeights]()
        for copies in apart.copies:
            a_RK, b_NR = own.a_RK.view_as(own.a_RK), own.b_NR.view_as(own.b_NR)
            copies[own.a_RK], copies[own.b_NR] = a_RK, b_NR
            adapters.append(LoraWeights(a_RK, b_NR, own.scaling))
        return lora_linear_segments(x, base.weight, base.bias, adapters, apart.segments, alike=True)

    def _weights(self, name: str) -> LoraWeights:
        parts = self._module._modules
        down, up = parts["lora_A"]._modules[name], parts["lora_B"]._modules[name]
        return LoraWeights(down._parameters["weight"], up._parameters["weight"], self._module.scaling[name])


def sole_adapter(module: Any, tokens: int) -> LoraWeights | None:
    """Returns the one adapter through which a call of this module with `tokens` tokens would put all of them,
    by the plain products of `lora.py`. None: the call would do anything else. Raises ModelError, as the call
    would, if another number of tokens was routed."""
    layer = vars(module).get("forward")
    return layer.sole_adapter(tokens) if isinstance(layer, _FusedLayer) else None


def _is_plain(module: Any) -> bool:
    """Returns True if the module is exactly PEFT's LoRA on a linear layer of torch: the weight is neither
    quantized nor stored transposed, and no other library's forward or hook is in its place."""
    from peft.tuners.lora import Linear

    base = module.base_layer
    return (
        type(module) is Linear
        and type(base) is nn.Linear
        and type(base.weight) is nn.Parameter
        and "forward" not in vars(base)
        and not is_watched(base)
    )


def is_watched(module: nn.Module) -> bool:
    """Returns True if a hook is registered for calls of this module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
