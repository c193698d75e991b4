"""A PEFT model on our arithmetic: the same numbers, whatever is done to the model, and adapters by token."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarmnode.errors import ModelError
from swarmnode.model.adapters.lora_patch import FusedLora, RoutedTokens

VOCABULARY, HIDDEN, LENGTH = 11, 8, 6
IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
Gradients = dict[str, Tensor]


class Toy(nn.Module):
    """Each token by itself: what one adapter did to a token cannot leak into another's."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, dtype=dtype)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False, dtype=dtype)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
        self.checkpointing: bool | None = None
        """Whether reentrant; None: off."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        hidden = self.embed(ids_BT)
        if self.checkpointing is None:
            return self.head(self._block(hidden))
        hidden.requires_grad_()
        return self.head(checkpoint(self._block, hidden, use_reentrant=self.checkpointing))

    def _block(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


def lora(rank: int = 4, targets: Sequence[str] = ("up", "down")) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=6, target_modules=list(targets), init_lora_weights=False, use_rslora=rank == 3
    )


def peft_toy(dtype: torch.dtype = torch.float64, config: LoraConfig | None = None) -> Any:
    model = get_peft_model(Toy(dtype), config or lora(), autocast_adapter_dtype=False)
    return model.to(dtype)


def several(dtype: torch.dtype = torch.float64) -> Any:
    """Adapters `default`, and `b` and `c` of other ranks, all trainable."""
    model = peft_toy(dtype)
    model.add_adapter("b", lora(3), autocast_adapter_dtype=False)
    model.add_adapter("c", lora(2), autocast_adapter_dtype=False)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def losses(model: Any, ids: Tensor = IDS) -> Tensor:
    logits = model(ids)
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none")


def step(model: Any, ids: Tensor = IDS) -> tuple[Tensor, Gradients]:
    model.zero_grad(set_to_none=True)
    loss = losses(model, ids).sum()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(
    ours: tuple[Tensor, Gradients], theirs: tuple[Tensor, Gradients], bound: float = 1e-10
) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=bound, atol=bound)
    assert ours[1].keys() == theirs[1].keys() and theirs[1]
    for name, gradient in theirs[1].items():
        distance = (ours[1][name].double() - gradient.double()).norm() / gradient.double().norm()
        assert distance <= bound, (name, float(distance))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused calls made from now on."""
    import swarmnode.model.adapters.lora_patch as patch

    calls: list[str] = []
    for name in ("lora_linear", "lora_linear_segments"):
        original: Callable[..., Tensor] = vars(patch)[name]

        def call(*args: Any, original: Callable[..., Tensor] = original, name: str = name) -> Tensor:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(patch, name, call)
    return calls


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "bound"),
    [
        (torch.float64, torch.float64, 1e-10),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 3e-2),
        (torch.bfloat16, torch.float32, 3e-2),
    ],
)
def test_loss_and_every_gradient_are_those_of_peft(
    dtype: torch.dtype, adapter_dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = peft_toy(dtype)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    theirs = step(model)
    fused = FusedLora(model)
    calls = counted(monkeypatch)
    assert_same(step(model), theirs, bound)
    assert fused.covers_all and calls == ["lora_linear"] * 2


@pytest.mark.usefixtures("exact_norms")
def test_a_real_transformer_gives_the_same_loss_and_gradients(policy: Any) -> None:
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))

    def run() -> tuple[Tensor, Gradients]:
        policy.peft_model.zero_grad(set_to_none=True)
        loss = policy.peft_model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in policy.trainable().items()}

    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1)
    policy.peft_model.double()
    theirs = run()
    fused = FusedLora(policy.peft_model)
    assert fused.covers_all
    assert_same(run(), theirs)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_tokens_of_several_adapters_in_one_batch_train_as_in_runs_of_their_own(
    checkpointing: bool | None,
) -> None:
    model = several()
    flat, runs = IDS.reshape(1, -1), [("b", 0, 5), ("default", 5, 8), ("c", 8, 10), (None, 10, 12)]
    expected: Gradients = {}
    total = torch.zeros((), dtype=torch.float64)
    for name, start, end in runs[:3]:
        model.set_adapter(name)
        loss, gradients = step(model, flat[:, start:end])
        total += loss
        expected |= {n: g for n, g in gradients.items() if f".{name}." in n}
    with torch.no_grad(), model.disable_adapter():
        total += losses(model, flat[:, 10:]).sum()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)

    model.get_base_model().checkpointing = checkpointing
    fused = FusedLora(model)
    with fused.route([RoutedTokens(name, end - start) for name, start, end in runs]):
        assert_same(step(model, flat), (total, expected))


def test_a_padded_batch_is_routed_row_after_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = several()
    fused = FusedLora(model)
    calls = counted(monkeypatch)
    with fused.route([RoutedTokens("b", LENGTH), RoutedTokens("default", LENGTH)]):
        mixed = losses(model)
    assert calls == ["lora_linear_segments"] * 2
    for name, row in (("b", slice(0, LENGTH)), ("default", slice(LENGTH, None))):
        model.set_adapter(name)
        torch.testing.assert_close(mixed[row], losses(model)[row])


def test_an_adapter_absent_from_the_batch_keeps_its_weights_and_its_step_count() -> None:
    model = several()
    fused = FusedLora(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with fused.route([RoutedTokens("default", 0), RoutedTokens("b", 12)]):
        step(model)
        optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if ".b." in n}
    assert len(optimizer.state) == len(moved)


def test_a_route_of_one_adapter_takes_it_whatever_is_active() -> None:
    model = several()
    model.set_adapter("b")
    theirs = losses(model)
    model.set_adapter("default")
    fused = FusedLora(model)
    with fused.route([RoutedTokens("b", 5), RoutedTokens("b", 7)]):
        torch.testing.assert_close(losses(model), theirs)


def test_a_route_to_the_base_is_disable_adapter_and_freezes_nothing() -> None:
    model = several()
    fused = FusedLora(model)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    with fused.route([RoutedTokens(None, 12)]):
        routed = losses(model)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trainable
    with model.disable_adapter():
        base = losses(model)
    torch.testing.assert_close(routed, base)
    assert not torch.allclose(losses(model), base)


def test_disable_adapter_inside_a_route_gives_the_base_and_the_route_goes_on_after() -> None:
    model = several()
    fused = FusedLora(model)
    with model.disable_adapter():
        base = losses(model)
    with fused.route([RoutedTokens("b", 4), RoutedTokens("default", 8)]):
        before = losses(model)
        with model.disable_adapter():
            torch.testing.assert_close(losses(model), base)
        torch.testing.assert_close(losses(model), before)


def test_routes_nest_and_end() -> None:
    model = several()
    fused = FusedLora(model)
    plain = losses(model)
    with fused.route([RoutedTokens("b", 12)]):
        outer = losses(model)
        with fused.route([RoutedTokens("c", 12)]):
            assert not torch.allclose(losses(model), outer)
        torch.testing.assert_close(losses(model), outer)
    with pytest.raises(KeyError), fused.route([RoutedTokens("b", 12)]):
        raise KeyError
    torch.testing.assert_close(losses(model), plain)


def test_a_wrong_count_is_named() -> None:
    model = several()
    fused = FusedLora(model)
    with (
        fused.route([RoutedTokens("b", 13)]),
        pytest.raises(ModelError, match=r"13 tokens were routed.* got 12"),
    ):
        losses(model)


def test_adapters_added_after_patching_work() -> None:
    model = peft_toy()
    fused = FusedLora(model)
    model.add_adapter("late", lora(2), autocast_adapter_dtype=False)
    model.double()
    assert fused.covers_all
    model.set_adapter("late")
    theirs = losses(model)
    model.set_adapter("default")
    with fused.route([RoutedTokens("late", LENGTH), RoutedTokens("default", LENGTH)]):
        mixed = losses(model)
    torch.testing.assert_close(mixed[:LENGTH], theirs[:LENGTH])
    torch.testing.assert_close(mixed[LENGTH:], losses(model)[LENGTH:])


def test_saving_loading_and_switching_stay_pefts(tmp_path: Path) -> None:
    model = several()
    FusedLora(model)
    expected = losses(model).detach()
    keys = list(model.state_dict())
    model.set_adapter("b")
    assert not torch.allclose(losses(model), expected)
    model.save_pretrained(str(tmp_path))
    assert model.load_adapter(str(tmp_path), "again", autocast_adapter_dtype=False)
    model.set_adapter("again")
    torch.testing.assert_close(losses(model).detach(), expected, rtol=1e-6, atol=1e-6)
    assert [key for key in model.state_dict() if "again" not in key] == keys


def test_a_copy_of_a_patched_model_trains_its_own_adapters() -> None:
    model = peft_toy()
    FusedLora(model)
    expected = step(model)
    twin = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    assert_same(step(twin), expected)
    assert all(p.grad is None for p in model.parameters())


def test_what_is_no_plain_lora_keeps_pefts_forward() -> None:
    model = peft_toy(config=lora(targets=("up", "embed")))
    theirs = step(model)
    assert not FusedLora(model).covers_all
    assert_same(step(model), theirs)


def test_hooks_on_a_base_layer_are_heard() -> None:
    model = peft_toy()
    heard: list[str] = []
    model.base_model.model.up.base_layer.register_forward_hook(lambda *_: heard.append("up"))
    assert not FusedLora(model).covers_all
    losses(model)
    assert heard == ["up"]
