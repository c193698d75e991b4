"""The policies in vLLM, and the weights from which each running request samples."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.extensions.vllm.vllm_driver import Driver
from swarmnode.rollout.decode.adapters.adapter import (
    PEFT_PREFIX,
    LoraPair,
    linear_modules,
    lora_pairs,
    merged_weight,
)
from swarmnode.rollout.engine import BASE_VERSION, PolicyUpdate


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy version that the engine was given."""

    version: int
    serial: int
    """Serial number. It counts up and is never used twice, unlike version numbers."""
    pairs: Mapping[str, LoraPair]
    """LoRA on top of the base, by module. Empty: the base itself."""

    @property
    def salt(self) -> str:
        """Cache salt: requests of one policy never find the keys and values of another."""
        return str(self.serial)


@dataclass(slots=True)
class Lane:
    """Weights inside vLLM, and the number of requests that sample from them."""

    policy: LoadedPolicy
    adapter: int | None
    """Number of the adapter in vLLM. None: the base weights unchanged."""
    follows: bool
    """True if its requests move to new policies; False if they asked for this version."""
    users: int = 0


class LoraPolicies:
    """Policies held as adapters. At most `max_versions` are live."""

    def __init__(self, driver: Driver, base: PreTrainedModel, rank: int, max_versions: int) -> None:
        self.max_versions = max_versions
        self.newest = LoadedPolicy(0, 0, {})
        self._driver = driver
        self._shapes = shapes(linear_weights(base))
        self._rank = rank
        self._adapters_so_far = 0
        self._base = Lane(LoadedPolicy(BASE_VERSION, -1, {}), None, follows=False)
        self._lanes: list[Lane] = []
        self._known = {0: self.newest}
        self._held: set[int] = set()
        """Versions loaded for requests that have not started yet."""
        self._serials = count(1)

    def live(self, asked: Collection[int]) -> set[int]:
        """Returns the live versions: the newest, those in use, and those that waiting requests `asked`
        for."""
        used = (lane.policy.version for lane in self._lanes if lane.users)
        return {self.newest.version, *asked, *self._held, *used}

    def has_base(self, newest: LoadedPolicy) -> bool:
        """Returns True if a request for the bare base can run while this policy is the newest."""
        return True

    def check(self, update: PolicyUpdate) -> LoadedPolicy:
        """Returns the policy of an update. Raises EngineError if it does not fit the model."""
        pairs = lora_pairs(update, self._shapes)
        rank = max((len(pair.a) for pair in pairs.values()), default=0)
        if rank > self._rank:
            raise EngineError(
                f"policy {update.version} has LoRA rank {rank}, but this engine holds rank {self._rank}",
                hint="start it with the rank of the trainer",
            )
        # Copies, because the trainer may write to its tensors again before an adapter is loaded. Each checked
        # policy gets its own serial, because no two policies may share a cache salt.
        return LoadedPolicy(
            update.version, next(self._serials), {m: _copied(pair) for m, pair in pairs.items()}
        )

    def adopt(self, policy: LoadedPolicy, asked: Collection[int]) -> None:
        """Makes a policy the newest, also for running followers. Other policies stay while they are in use or
        waiting requests `asked` for them."""
        for lane in self._lanes:
            if lane.follows:
                self._load(lane, policy)
        self.newest = self._known[policy.version] = policy
        self._held &= set(asked)
        live = self.live(asked)
        self._known = {version: known for version, known in self._known.items() if version in live}
        self._lane(policy, follows=True)
        self._drop_unused()

    def hold(self, policy: LoadedPolicy) -> None:
        """Makes a policy live beside the newest one, for requests that will ask for it."""
        self._known[policy.version] = policy
        self._held.add(policy.version)

    def enter(self, version: int | None) -> Lane:
        """Returns the lane of a request that starts now."""
        if version == BASE_VERSION:
            lane = self._base
        elif version is None:
            lane = self._lane(self.newest, follows=True)
        else:
            lane = self._lane(self._known[version], follows=False)
            self._held.discard(version)
        lane.users += 1
        return lane

    def leave(self, lane: Lane) -> None:
        lane.users -= 1
        self._drop_unused()

    def _lane(self, policy: LoadedPolicy, follows: bool) -> Lane:
        for lane in self._lanes:
            if lane.policy is policy and lane.follows == follows:
                return lane
        self._adapters_so_far += 1
        lane = Lane(policy, self._adapters_so_far, follows)
        self._load(lane, policy)
        self._lanes.append(lane)
        return lane

    def _load(self, lane: Lane, policy: LoadedPolicy) -> None:
        assert lane.adapter is not None
        with TemporaryDirectory(prefix="swarmnode-adapter-") as folder:
            write_adapter(Path(folder), policy.pairs, self._rank, self._shapes)
            self._driver.load_adapter(lane.adapter, Path(folder))
        lane.policy = policy

    def _drop_unused(self) -> None:
        for lane in list(self._lanes):
            ready_for_the_next = lane.follows and lane.policy is self.newest
            if lane.users == 0 and not ready_for_the_next and lane.adapter is not None:
                self._driver.drop_adapter(lane.adapter)
                self._lanes.remove(lane)


class MergedPolicies:
    """One policy, always merged into the original base weights, so that rounding errors do not accumulate."""

    max_versions = 1

    def __init__(self, driver: Driver, base: PreTrainedModel, dtype: torch.dtype) -> None:
        self.newest = LoadedPolicy(0, 0, {})
        self._driver = driver
        self._weights = linear_weights(base)
        self._shapes = shapes(self._weights)
        self._dtype = dtype
        self._lane = Lane(self.newest, None, follows=True)

    def live(self, asked: Collection[int]) -> set[int]:
        return {self.newest.version}

    def has_base(self, newest: LoadedPolicy) -> bool:
        return not newest.pairs

    def check(self, update: PolicyUpdate) -> LoadedPolicy:
        return LoadedPolicy(update.version, self.newest.serial + 1, lora_pairs(update, self._shapes))

    def adopt(self, policy: LoadedPolicy, asked: Collection[int]) -> None:
        changed = {*self.newest.pairs, *policy.pairs}
        if changed:
            self._driver.load_weights(self._merged(policy.pairs, changed))
        self.newest = self._lane.policy = policy

    def hold(self, policy: LoadedPolicy) -> None:
        raise EngineError(
            f"policy {policy.version} cannot be live beside {self.newest.version}, merged into the model",
            hint='start vLLM with weights="lora"',
        )

    def enter(self, version: int | None) -> Lane:
        if version == BASE_VERSION:
            return Lane(replace(self.newest, version=BASE_VERSION), None, follows=False)
        return self._lane

    def leave(self, lane: Lane) -> None:
        """Does nothing: the weights stay."""

    def _merged(
        self, pairs: Mapping[str, LoraPair], changed: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        # vLLM fuses neighbouring weights (q, k and v; gate and up) and needs all parts of those it rebuilds.
        parents = {module.rpartition(".")[0] for module in changed}
        for module, weight in self._weights.items():
            if module.rpartition(".")[0] in parents:
                if module in pairs:
                    weight = merged_weight(weight, pairs[module], self._dtype)
                yield f"{module}.weight", weight.to("cpu", self._dtype)


Policies = LoraPolicies | MergedPolicies
"""The ways to hold policies in vLLM."""


def linear_weights(base: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the weights that a policy may change, by their names without PEFT's layers. They exclude the
    head, which may also be the embedding."""
    return {
        name.removeprefix(PEFT_PREFIX).removesuffix(".base_layer"): module.weight.detach()
        for name, module in linear_modules(base).items()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


def shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Returns (out, in) by module."""
    return {module: (weight.shape[0], weight.shape[1]) for module, weight in weights.items()}


def write_adapter(
    folder: Path, pairs: Mapping[str, LoraPair], rank: int, fitting: Mapping[str, tuple[int, int]]
) -> None:
    """Saves an adapter in PEFT's format. B already includes the scaling."""
    if not pairs:
        pairs = _nothing(fitting)
    tensors: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = pair.a.contiguous()
        tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = (pair.b.float() * pair.scaling).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in pairs})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _copied(pair: LoraPair) -> LoraPair:
    return LoraPair(pair.a.to("cpu", copy=True), pair.b.to("cpu", copy=True), pair.scaling)


def _nothing(fitting: Mapping[str, tuple[int, int]]) -> dict[str, LoraPair]:
    """Returns an adapter that changes nothing, because a file must name at least one module."""
    module, (out, into) = next(iter(fitting.items()))
    return {module: LoraPair(torch.zeros(1, into), torch.zeros(out, 1), 1.0)}
