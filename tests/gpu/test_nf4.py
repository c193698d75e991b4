"""4-bit weights on a card: sampled and trained where they lie. Skipped without a GPU or bitsandbytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from swarmnode.extensions.generate.generate_engine import GenerateEngine
from swarmnode.rollout.engine import PolicyUpdate, Request, SamplingParams
from tests.packed import in_nf4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of a log-probability. The product of few rows is another kernel than that of many."""

PROMPTS = [tuple(range(2, 2 + length)) for length in (3, 9, 1, 17)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, PolicyUpdate]:
    """A PEFT model over an NF4 base, its adapter not the identity, and that adapter as an update."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).to(request.param)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    peft_model: Any = get_peft_model(in_nf4(model, tmp_path, "cuda"), config).eval()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.03)
    state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    return peft_model, PolicyUpdate(1, {name: t.detach().clone() for name, t in state.items()}, 2.0)


def sampled(engine: GenerateEngine) -> list[tuple[tuple[int, ...], Any]]:
    """Each prompt with its output."""
    engine.submit([Request(str(i), prompt, SamplingParams(16, seed=i)) for i, prompt in enumerate(PROMPTS)])
    outputs: dict[str, Any] = {}
    while len(outputs) < len(PROMPTS):
        outputs |= {output.request_id: output for output in engine.step()}
    return [(prompt, outputs[str(i)]) for i, prompt in enumerate(PROMPTS)]


def gradients(peft_model: Any) -> dict[str, Tensor]:
    peft_model.zero_grad(set_to_none=True)
    ids = torch.arange(2, 66, device="cuda")[None]
    peft_model(input_ids=ids).logits.float().log_softmax(-1)[..., 7].sum().backward()
    return {n: p.grad.clone() for n, p in peft_model.named_parameters() if p.grad is not None}


def test_the_engine_takes_the_memory_of_adapters_and_has_the_log_probabilities_of_training(
    policy: tuple[Any, PolicyUpdate],
) -> None:
    peft_model, update = policy
    adapter = sum(tensor.numel() * tensor.element_size() for tensor in update.tensors.values())
    before = torch.cuda.memory_allocated()
    engine = GenerateEngine(peft_model.get_base_model(), (), max_slots=4)
    assert torch.cuda.memory_allocated() - before < 3 * adapter
    engine.set_policy(update)
    for prompt, output in sampled(engine):
        ids = torch.tensor([[*prompt, *output.token_ids]], device="cuda")
        with torch.no_grad():
            logits = peft_model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = torch.tensor(output.token_ids, device="cuda")[:, None]
        plain = logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu()
        torch.testing.assert_close(
            torch.tensor(output.logprobs), plain, atol=TOLERANCE[peft_model.dtype], rtol=0
        )


def test_sampling_changes_nothing_for_training(policy: tuple[Any, PolicyUpdate]) -> None:
    peft_model, update = policy
    before = gradients(peft_model)
    engine = GenerateEngine(peft_model.get_base_model(), (), max_slots=4)
    engine.set_policy(PolicyUpdate(2, {name: tensor * 3 for name, tensor in update.tensors.items()}, 1.0))
    sampled(engine)
    after = gradients(peft_model)
    assert len(before) == 4 * 7 * 2
    for name in before:
        torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=1e-3)
