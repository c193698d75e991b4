"""Gives the LoRA layers of a PEFT model our arithmetic, and each adapter its own tokens of a batch.

policy.py, trainer.py -> [lora_patch] -> lora.py (plain layers), PEFT's own forward (all others)

PEFT stays the container: names, files, merging and switching are its own, and only `forward` of single
modules is replaced. Every call looks at the module as it is then, so whatever PEFT does to it later needs no
word to us.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from swarmnode.errors import ModelError
from swarmnode.model.adapters.lora import LoraWeights, Segment, lora_linear, lora_linear_segments


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Neighbouring tokens of a batch, flattened row after row, that go through one adapter."""

    adapter: str | None
    """PEFT's name of the adapter. None: the base model alone."""
    tokens: int


class FusedLora:
    """A PeftModel whose LoRA layers run on `lora.py` from its construction on.

    >>> fused = FusedLora(peft_model)                                         # doctest: +SKIP
    >>> with fused.route([RoutedTokens("default", 120), RoutedTokens("policy-1", 80), RoutedTokens(None, 8)]):
    ...     loss(peft_model, batch).backward()                                # doctest: +SKIP

    Without a route PEFT's active adapter takes all tokens. Raises ModelError on a model patched already.
    """

    def __init__(self, peft_model: Any) -> None:
        self._peft_model = peft_model
        self._current = _Current()
        self._patched: dict[str, _FusedLayer] = {}
        self._left_alone: dict[str, str] = {}
        self._seen: dict[str, Any] = {}
        self._patch()

    @property
    def unpatched(self) -> Mapping[str, str]:
        """Reasons of the modules that keep PEFT's own forward. Passing reasons (dropout, merging) are left
        out."""
        self._patch()
        reasons = {name: layer.lasting_obstacle() for name, layer in self._patched.items()}
        return self._left_alone | {name: reason for name, reason in reasons.items() if reason is not None}

    @property
    def covers_all(self) -> bool:
        """True if every adapted module runs on our arithmetic: only then can a batch mix adapters."""
        return bool(self._patched) and not self.unpatched

    @contextmanager
    def route(self, tokens: Sequence[RoutedTokens]) -> Iterator[None]:
        """Context that sends each run of tokens through its adapter, in forward, backward and recomputation.

        The runs must add up to the tokens (B * T) of every input that meets an adapter. Layers that lack an
        adapter give its tokens the base. `[RoutedTokens(None, n)]` is the base model like
        `disable_adapter()`, which besides freezes every adapter but the active one on its way out.

        An adapter is trained only while its parameters require gradients, and PEFT freezes all but the active
        one: `peft_model.set_requires_grad(names)` before.

        Raises ModelError for an unknown adapter, and where a layer that must stay PEFT's would mix adapters.
        """
        self._patch()
        route = _Route.of(tokens)
        self._check(route)
        previous, self._current.route = self._current.route, route
        try:
            yield
        finally:
            self._current.route = previous

    @contextmanager
    def apart(self, tokens: Sequence[int]) -> Iterator[list[dict[Tensor, Tensor]]]:
        """Context in which each of these runs of tokens meets copies of the active adapter's weights, so that
        autograd tells the gradients of the runs apart. Yields the copies by run, each by what it is of, as
        far as layers were called. Only where `covers_all` and nothing is computed again in the backward pass.

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

    def _patch(self) -> None:
        """Patches modules that are not patched yet: adapters added since may be on layers that had none."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        if self._seen == self._peft_model.peft_config:
            return
        for name, module in self._peft_model.named_modules():
            if name in self._patched and self._patched[name].module is module:
                continue
            if isinstance(module, AuxiliaryTrainingWrapper):
                self._left_alone[name] = "it is trained as a whole, not by LoRA"
            elif isinstance(module, BaseTunerLayer):
                self._patch_layer(name, module)
        self._seen = dict(self._peft_model.peft_config)

    def _patch_layer(self, name: str, module: Any) -> None:
        if isinstance(vars(module).get("forward"), _FusedLayer):
            raise ModelError("the LoRA layers of this model are patched already", hint="use that one")
        reason = _why_not(module)
        if reason is not None:
            self._left_alone[name] = reason
            return
        # On the instance, before its class's forward: hooks, names and state_dict are untouched.
        module.forward = self._patched[name] = _FusedLayer(name, module, self._current)

    def _check(self, route: "_Route") -> None:
        unknown = [name for name in route.adapters if name not in self._peft_model.peft_config]
        if unknown:
            known = ", ".join(self._peft_model.peft_config)
            raise ModelError(f"no adapter is called {unknown[0]}", hint=f"there are: {known}")
        if self._left_alone and [route.sole] != list(self._peft_model.active_adapters):
            name, reason = next(iter(self._left_alone.items()))
            raise ModelError(
                f"{name} cannot tell adapters apart within a batch: {reason}",
                hint="train one policy at a time, or restrict the adapters to plain linear layers",
            )


@dataclass(slots=True)
class _Current:
    """The route in force, shared by all layers. A plain object, since autograd recomputes checkpoints in a
    thread of its own, without our thread-local and context variables."""

    route: "_Route | None" = None
    apart: "_Apart | None" = None


@dataclass(frozen=True, slots=True)
class _Apart:
    segments: tuple[Segment, ...]
    copies: list[dict[Tensor, Tensor]]
    """Copies of every A and B by segment, each by what it is of."""


@dataclass(frozen=True, slots=True)
class _Route:
    runs: tuple[tuple[int, int, str | None], ...]
    """Runs (start, end, adapter), none of them empty, neighbours differ."""
    tokens: int
    adapters: tuple[str, ...]
    """Adapters with tokens, in order of first appearance."""
    sole: str | None
    """Adapter that has all tokens. None: there are several."""
    segments_by_order: dict[tuple[str, ...], tuple[Segment, ...]] = field(default_factory=dict)
    """Segments by a layer's order of adapters. Nearly all layers have the same, so they are computed once a
    route."""

    @classmethod
    def of(cls, routed: Sequence[RoutedTokens]) -> "_Route":
        runs: list[tuple[int, int, str | None]] = []
        end = 0
        for part in routed:
            if part.tokens < 0:
                raise ModelError(f"{part.tokens} tokens were routed to {part.adapter or 'the base'}")
            start, end = end, end + part.tokens
            if runs and runs[-1][2] == part.adapter:
                runs[-1] = (runs[-1][0], end, part.adapter)
            elif part.tokens:
                runs.append((start, end, part.adapter))
        adapters = tuple(dict.fromkeys(adapter for _, _, adapter in runs if adapter is not None))
        return cls(tuple(runs), end, adapters, runs[0][2] if len(runs) == 1 else None)

    def segments(self, order: tuple[str, ...]) -> tuple[Segment, ...]:
        """Returns the runs of a layer with these adapters; runs of other adapters are the base's."""
        if order not in self.segments_by_order:
            index = {name: i for i, name in enumerate(order)}
            self.segments_by_order[order] = tuple(
                Segment(start, end, -1 if adapter is None else index.get(adapter, -1))
                for start, end, adapter in self.runs
            )
        return self.segments_by_order[order]


class _FusedLayer:
    """Replaces the `forward` of one module; that of its class stays below."""

    __slots__ = ("_current", "_name", "module")

    def __init__(self, name: str, module: Any, current: _Current) -> None:
        self._name = name
        self._current = current
        self.module = module

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module, route = self.module, self._current.route
        if module.disable_adapters:
            return self._peft_forward(x, *args, **kwargs)
        if self._current.apart is not None:
            return self._apart(x, self._current.apart)
        adapters = module.active_adapters if route is None else route.adapters
        obstacle = "it is called with more than its input" if args or kwargs else self._obstacle(adapters)
        if route is None:
            if obstacle is not None or len(adapters) != 1:
                return self._peft_forward(x, *args, **kwargs)
            return self._sole(x, adapters[0])
        self._check_tokens(x.numel() // x.shape[-1], route)
        if obstacle is not None:
            if [route.sole] != module.active_adapters:
                raise ModelError(f"{self._name} cannot tell adapters apart within a batch: {obstacle}")
            return self._peft_forward(x, *args, **kwargs)
        return self._mixed(x, route) if route.sole is None else self._sole(x, route.sole)

    def sole_adapter(self, tokens: int) -> LoraWeights | None:
        """Returns the adapter that takes all tokens, as the function `sole_adapter` does."""
        module, route = self.module, self._current.route
        if module.disable_adapters or self._current.apart is not None:
            return None
        adapters = module.active_adapters
        if route is not None:
            self._check_tokens(tokens, route)
            adapters = () if route.sole is None else (route.sole,)
        if len(adapters) != 1 or adapters[0] not in module.lora_A or self._obstacle(adapters) is not None:
            return None
        return self._weights(adapters[0])

    def lasting_obstacle(self) -> str | None:
        """Returns the reason why this module falls back to PEFT's forward until it is changed, or None."""
        reasons = (_adapter_obstacle(self.module, name) for name in self.module.lora_A)
        return _base_obstacle(self.module) or next((reason for reason in reasons if reason is not None), None)

    def _obstacle(self, adapters: Sequence[str]) -> str | None:
        module = self.module
        if module.merged:
            return "adapters are merged into its weight"
        factors = module._modules["lora_A"]
        for name in adapters:
            if name not in factors:
                continue
            if module.training and not isinstance(module.lora_dropout[name], nn.Identity):
                return "its dropout is active"
            if (reason := _adapter_obstacle(module, name)) is not None:
                return reason
        return _base_obstacle(module)

    def _sole(self, x: Tensor, name: str) -> Tensor:
        """Sends all tokens through one adapter."""
        # By way of `_modules`: on a fast card the look-up of each attribute by `nn.Module` takes time.
        parts = self.module._modules
        base = parts["base_layer"]
        if name not in parts["lora_A"]:
            return base(x)
        own = base._parameters
        return lora_linear(x, own["weight"], own["bias"], self._weights(name))

    def _mixed(self, x: Tensor, route: _Route) -> Tensor:
        segments = route.segments(tuple(self.module.lora_A))
        if all(segment.adapter < 0 for segment in segments):
            return self.module.base_layer(x)
        base = self.module.base_layer
        adapters = [self._weights(name) for name in self.module.lora_A]
        return lora_linear_segments(x, base.weight, base.bias, adapters, segments)

    def _apart(self, x: Tensor, apart: _Apart) -> Tensor:
        own, base = self._weights(self.module.active_adapters[0]), self.module.base_layer
        adapters = list[LoraWeights]()
        for copies in apart.copies:
            a_RK, b_NR = own.a_RK.view_as(own.a_RK), own.b_NR.view_as(own.b_NR)
            copies[own.a_RK], copies[own.b_NR] = a_RK, b_NR
            adapters.append(LoraWeights(a_RK, b_NR, own.scaling))
        return lora_linear_segments(x, base.weight, base.bias, adapters, apart.segments, alike=True)

    def _weights(self, name: str) -> LoraWeights:
        parts = self.module._modules
        down, up = parts["lora_A"]._modules[name], parts["lora_B"]._modules[name]
        return LoraWeights(down._parameters["weight"], up._parameters["weight"], self.module.scaling[name])

    def _check_tokens(self, tokens: int, route: _Route) -> None:
        if tokens != route.tokens:
            raise ModelError(
                f"{route.tokens} tokens were routed, {self._name} got {tokens}",
                hint="route every token of the batch, padding too (None: the base alone)",
            )

    def _peft_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return type(self.module).forward(self.module, *args, **kwargs)


def sole_adapter(module: Any, tokens: int) -> LoraWeights | None:
    """Returns the one adapter that a call of this module with `tokens` tokens would put them all through by
    the plain products of `lora.py`. None: the call would do anything else. Raises ModelError, as the call
    would, for another number of tokens than were routed."""
    layer = vars(module).get("forward")
    return layer.sole_adapter(tokens) if isinstance(layer, _FusedLayer) else None


def _why_not(module: Any) -> str | None:
    """Returns the reason in the module itself to keep PEFT's forward, or None."""
    from peft.tuners.lora import Linear

    if type(module) is not Linear:
        return f"it is PEFT's {type(module).__name__}, not its plain linear layer"
    base = module.base_layer
    if "forward" in vars(module) or "forward" in vars(base):
        return "another library has replaced its forward"
    if module.fan_in_fan_out:
        return "its weight is stored transposed"
    return _base_obstacle(module) if type(base) is not nn.Linear else None


def _base_obstacle(module: Any) -> str | None:
    base = module._modules["base_layer"]
    if type(base) is not nn.Linear:
        return f"its base layer is a {type(base).__name__}"
    weight, bias = base._parameters["weight"], base._parameters["bias"]
    if type(weight) is not nn.Parameter:
        return f"its base weight is a {type(weight).__name__}"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its base layer is trained too"
    if base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks:
        return "hooks watch its base layer"
    return None


def _adapter_obstacle(module: Any, name: str) -> str | None:
    if name in module.lora_variant:
        return f"adapter {name} is of a variant ({type(module.lora_variant[name]).__name__})"
    return f"adapter {name} has a bias" if module.lora_bias[name] else None
