"""The generate engine on a base whose weights are packed: shared, never written to, LoRA beside them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.extensions.generate.generate_engine import GenerateEngine
from swarmnode.extensions.generate.model_lora import AddedLora, MergedLora, is_quantized, own_model
from swarmnode.rollout.engine import Output, PolicyUpdate, Request
from swarmnode.rollout.engine_choice import make_engine
from tests.packed import in_bytes, in_nf4

Ask = Callable[..., Request]
Run = Callable[..., dict[str, Output]]
TOLERANCE = 1e-5
"""Of a log-probability, against a plain forward pass of the same packed model."""

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(params=["bytes", "nf4"])
def packed(request: pytest.FixtureRequest, tiny: PreTrainedModel, tmp_path: Path) -> PreTrainedModel:
    model = copy.deepcopy(tiny)
    return in_bytes(model) if request.param == "bytes" else in_nf4(model, tmp_path)


def with_adapter(model: PreTrainedModel) -> tuple[Any, PolicyUpdate]:
    """A trainer's PEFT model over the packed base, and its policy as an update."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    peft_model: Any = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    return peft_model, PolicyUpdate(1, {name: t.detach().clone() for name, t in state.items()}, 1.5)


def logprobs_of(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def differences(model: Any, requests: list[Request], outputs: dict[str, Output]) -> float:
    """Largest difference of a recorded log-probability to the plain forward pass."""
    largest = 0.0
    for request in requests:
        output = outputs[request.request_id]
        plain = logprobs_of(model, request.prompt_ids, output.token_ids)
        largest = max(largest, float((torch.tensor(output.logprobs) - plain).abs().max()))
    return largest


def test_a_policy_over_packed_weights_is_sampled_with_the_log_probabilities_of_training(
    packed: PreTrainedModel, ask: Ask, run: Run
) -> None:
    peft_model, update = with_adapter(packed)
    engine = GenerateEngine(peft_model.get_base_model(), (), max_slots=4)
    requests = [ask(i, length, 12) for i, length in enumerate((3, 9, 1, 17))]
    base = run(engine, requests)
    engine.set_policy(update)
    policy = run(engine, requests)
    assert differences(peft_model, requests, policy) < TOLERANCE
    assert base != policy
    engine.set_policy(PolicyUpdate(2, {}, 1.0))
    assert {name: o.token_ids for name, o in run(engine, requests).items()} == {
        name: o.token_ids for name, o in base.items()
    }
    with peft_model.disable_adapter():
        assert differences(peft_model, requests, base) < TOLERANCE


def test_packed_weights_are_shared_and_lora_layers_are_left_behind(packed: PreTrainedModel) -> None:
    peft_model, _ = with_adapter(packed)
    model = peft_model.get_base_model()
    own, lora = own_model(model)
    assert isinstance(lora, AddedLora) and is_quantized(own)
    base = {id(p) for name, p in model.named_parameters() if ".lora_" not in name}
    assert {id(parameter) for parameter in own.parameters()} == base
    assert own is not model and own.model.layers[0] is not model.model.layers[0]


def test_plain_weights_are_still_copied_and_merged(tiny: PreTrainedModel) -> None:
    own, lora = own_model(tiny)
    assert isinstance(lora, MergedLora)
    assert not {id(p) for p in own.parameters()} & {id(p) for p in tiny.parameters()}


def gradients(peft_model: Any) -> dict[str, Tensor]:
    peft_model.zero_grad(set_to_none=True)
    ids = torch.arange(2, 34)[None]
    peft_model(input_ids=ids).logits.log_softmax(-1)[..., 7].sum().backward()
    return {n: p.grad.clone() for n, p in peft_model.named_parameters() if p.grad is not None}


def test_sampling_changes_nothing_for_training(packed: PreTrainedModel, ask: Ask, run: Run) -> None:
    """bitsandbytes would rearrange the weights for a CPU in the first pass without gradients."""
    peft_model, update = with_adapter(packed)
    before = gradients(peft_model)
    engine = GenerateEngine(peft_model.get_base_model(), (), max_slots=2)
    other = {name: tensor * 3 for name, tensor in update.tensors.items()}
    engine.set_policy(PolicyUpdate(4, other, 1.0))
    run(engine, [ask(0, 5, 6), ask(1, 2, 6)])
    after = gradients(peft_model)
    assert len(before) == 28
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_was_sent_may_be_overwritten(packed: PreTrainedModel, ask: Ask, run: Run) -> None:
    _, update = with_adapter(packed)
    engine = GenerateEngine(packed, (), max_slots=1)
    engine.set_policy(update)
    first = run(engine, [ask(0, 5, 6)])["0"].logprobs
    for tensor in update.tensors.values():
        tensor.zero_()
    assert run(engine, [ask(0, 5, 6)])["0"].logprobs == first


def test_a_policy_of_another_model_is_refused_by_the_true_shape(packed: PreTrainedModel) -> None:
    _, update = with_adapter(packed)
    engine = GenerateEngine(packed, ())
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    with pytest.raises(EngineError, match=r"its weight is \(64, 96\)"):
        engine.set_policy(PolicyUpdate(1, {**update.tensors, name: torch.zeros(4, 64)}, 1.0))
    assert engine.policy_version == 0


def test_a_packed_model_is_not_moved(packed: PreTrainedModel) -> None:
    with pytest.raises(EngineError, match="on its own device"):
        GenerateEngine(packed, (), device="meta")


def test_the_choice_of_engine_says_why(packed: PreTrainedModel) -> None:
    engine, reason = make_engine(packed, (0,), source="folder", lora_rank=4)
    assert isinstance(engine, GenerateEngine)
    assert reason.startswith("generate engine: one batch at a time, as its weights are quantized and ")
