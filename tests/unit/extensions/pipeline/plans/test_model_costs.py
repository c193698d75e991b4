from dataclasses import replace

from swarmnode.extensions.pipeline.plans.model_costs import StageTraining, model_costs
from swarmnode.extensions.pipeline.plans.plan_settings import LayerCost
from swarmnode.machine.memory_plan import ModelCard, Workload, adapter_parameters, plan_memory

CARD = ModelCard("m", 1.24e9, 16, 2048, 8192, 32, 8, 64, vocabulary=128_256, tied=True)
LORA = StageTraining("lora", 16, 2, 2048)


def test_all_layers_and_the_ends_hold_what_the_whole_model_holds() -> None:
    costs = model_costs(CARD, LORA)
    work = Workload(rank=16, slots=0, sequence_tokens=0, micro_batch_tokens=2048, number_bytes=2)
    whole = plan_memory(CARD, work)
    held = costs.layers * costs.layer.held_bytes + costs.ends.held_bytes
    # Of an adapter there are one and not two, but sums, shares and copies of its gradient and its moments.
    adapter = adapter_parameters(CARD, 16)
    expected = whole.weights + adapter * (4 + 12 + 12) + whole.optimizer + whole.logprobs
    passing = 2048 * 2 * (3 * CARD.intermediate + 2 * CARD.hidden)
    assert abs(held - expected - passing) < 1000


def test_a_micro_batch_keeps_what_the_whole_models_does() -> None:
    costs = model_costs(CARD, LORA)
    work = Workload(rank=16, slots=0, sequence_tokens=0, micro_batch_tokens=2048, number_bytes=2)
    kept = costs.layers * costs.layer.activation_bytes + costs.ends.activation_bytes
    passing = 2048 * 2 * (3 * CARD.intermediate + 2 * CARD.hidden)
    assert 2048 * kept + passing == plan_memory(CARD, work).activations


def test_training_all_weights_takes_several_times_the_memory() -> None:
    full = model_costs(CARD, replace(LORA, trainable="full"))
    assert full.layer.held_bytes > 5 * model_costs(CARD, LORA).layer.held_bytes


def test_recomputed_activations_are_held_for_one_micro_batch_only() -> None:
    kept, again = (model_costs(CARD, replace(LORA, recomputed=recomputed)) for recomputed in (False, True))
    slots = 8

    def needed(layer: LayerCost) -> int:
        return layer.held_bytes + slots * 2048 * layer.activation_bytes

    assert needed(again.layer) < needed(kept.layer) / 4
    assert again.layer.held_bytes > kept.layer.held_bytes
