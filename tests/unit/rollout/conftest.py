"""A tiny random Qwen2 and what is needed to ask it something."""

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from swarmnode.rollout.engine import Engine, Output, Request, SamplingParams

VOCAB = 61


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


@pytest.fixture
def ask() -> Callable[..., Request]:
    """A request with a random prompt of a given length, the same for the same `name`."""

    def build(name: int, prompt_length: int, max_tokens: int, prompt_seed: int | None = None) -> Request:
        rng = random.Random(name if prompt_seed is None else prompt_seed)
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(prompt_length))
        return Request(str(name), prompt, SamplingParams(max_tokens, seed=name))

    return build


@pytest.fixture
def run() -> Callable[..., dict[str, Output]]:
    """Submit, and step until nothing is in flight."""

    def drive(engine: Engine, requests: Iterable[Request]) -> dict[str, Output]:
        engine.submit(requests)
        outputs: list[Output] = []
        for _ in range(10_000):
            if engine.stats().running + engine.stats().waiting == 0:
                break
            outputs += engine.step()
        return {output.request_id: output for output in outputs}

    return drive
