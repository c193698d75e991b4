"""What is read of strangers' rows is what training would compute, and cuts are told from one pass."""

from collections.abc import Sequence

import pytest

from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training import forward
from swarmnode.training.forward import Forward
from swarmnode.training.rules.mending.cuts import SURPRISING_NATS, ReadingRequest
from swarmnode.training.rules.mending.reading import Reader

PROMPT = (3, 4, 5)
LONG, SHORT = (7, 8, 9, 10, 11, 1), (12, 13, 1)


def reader(policy: Policy, *, tokens: int = 4096, top_p: float = 1.0) -> Reader:
    config = TrainingConfig(micro_batch_tokens=tokens)
    return Reader(Forward(policy, config, temperature=1.0, top_p=top_p), policy.number)


def rows(looks: Sequence[int] | None) -> list[ReadingRequest]:
    return [
        ReadingRequest(PROMPT, LONG, looks),
        ReadingRequest(PROMPT, SHORT, looks),
        ReadingRequest((6, 2), LONG, looks),
    ]


@pytest.mark.parametrize(("packed", "top_p"), [(True, 1.0), (False, 1.0), (True, 0.5)])
def test_rows_are_read_in_order_with_and_without_looks(
    nudged: Policy, monkeypatch: pytest.MonkeyPatch, packed: bool, top_p: float
) -> None:
    if not packed:
        monkeypatch.setattr(forward, "prepare_for_packing", lambda model: "it has layers of another type")
    read = reader(nudged, top_p=top_p)
    plain, looked = read(rows(None)), read(rows([0]))
    for row, one, other in zip(rows(None), plain, looked, strict=True):
        assert len(one.logprobs) == len(row.token_ids)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert not one.after_cut
    assert plain[0].logprobs != pytest.approx(plain[2].logprobs, abs=1e-3)


def test_what_stands_behind_a_cut_is_what_reading_the_rest_would_tell(nudged: Policy) -> None:
    read = reader(nudged)
    (whole,) = read([ReadingRequest(PROMPT, LONG, [2])])
    # An untrained policy finds every token surprising: one may cut anywhere but before the end.
    assert all(logprob < -SURPRISING_NATS for logprob in whole.logprobs)
    assert sorted(whole.after_cut) == [0, 1, 2, 3, 4]
    for start, behind in whole.after_cut.items():
        for end in range(start + 1, len(LONG)):
            (rest,) = read([ReadingRequest(PROMPT, (*LONG[:start], *LONG[end:]))])
            assert behind[end - start - 1] == pytest.approx(rest.logprobs[start], abs=1e-4)


def test_many_rows_go_through_in_small_batches(nudged: Policy) -> None:
    many = [ReadingRequest(PROMPT, (number, 1), ()) for number in range(2, 30)]
    assert [r.logprobs for r in reader(nudged, tokens=16)(many)] == [
        pytest.approx(r.logprobs, abs=1e-4) for r in reader(nudged)(many)
    ]
    assert reader(nudged)([]) == []


def test_policies_on_one_base_read_each_with_its_own_adapter(nudged: Policy) -> None:
    from swarmnode.settings.config import PolicyConfig

    second = Policy(nudged.base, PolicyConfig(lora_rank=4, lora_alpha=8), seed=5, beside=nudged)
    forward = Forward(nudged, TrainingConfig(), temperature=1.0)
    forward.add(second)
    row = [ReadingRequest(PROMPT, LONG)]
    (first,), (other,) = Reader(forward, nudged.number)(row), Reader(forward, second.number)(row)
    assert first.logprobs != pytest.approx(other.logprobs, abs=1e-3)
