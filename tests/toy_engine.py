"""A module of a user's with an engine of its own, named in `rollout.engine` by import path."""

from swarmnode.engine_record import EngineOptions, EngineRecord
from swarmnode.testing.fake_engine import FakeEngine


def repeats_the_prompt(options: EngineOptions) -> FakeEngine:
    """Answers with the prompt; every second completion of a question stops after its first token."""
    eos, length = options.eos_token_ids[0], options.max_length or 4096
    asked = 0

    def answer(prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        return (*prompt_ids[: len(prompt_ids) if asked % 2 else 1], eos)

    # No token is drawn by lot: each had a probability of 1.
    return FakeEngine(
        lambda request: answer(request.prompt_ids), options.max_slots, length, logprob=0.0, name="repeats"
    )


ENGINE = EngineRecord("repeats", make=repeats_the_prompt)
FOR_A_CARD = EngineRecord(
    "for_a_card",
    make=repeats_the_prompt,
    missing=lambda device: "the card's driver is not installed",
    install="pip install the-driver",
)
NO_ENGINE = repeats_the_prompt
OWN_ENGINE = f"{__name__}:ENGINE"
