"""Text to micro-batches: the same for the same name, errors that help."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import swarmnode.extensions.pipeline.feeds.text_feed as sources
from benchmarks.pipeline_local import LocalPipeline
from swarmnode.errors import ConfigError
from swarmnode.extensions.demonstration.tiny import build_quick_tiny
from swarmnode.extensions.pipeline.execution.member_records import Feed
from swarmnode.extensions.pipeline.feeds.objectives import cross_entropy
from swarmnode.extensions.pipeline.feeds.text_feed import TextFeed, TextSettings, TextSource
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.training.packing import MicroBatch
from tests.unit.extensions.pipeline.tiny_models import CPU, VOCABULARY, saved, tiny_config, tiny_model

END = 1
UNREADABLE = Path("/proc/self/mem")
"""Its first page is not there."""
SETTINGS = TextSettings(sequence_tokens=6, batch_sequences=3, seed=0)
Sequences = list[tuple[int, ...]]


def encode(text: str) -> list[int]:
    """Letters to ids from 2 on."""
    return [2 + ord(letter) % 32 for letter in text]


def words(count: int) -> list[str]:
    """Documents that differ, each of one word of five letters: with its end a sequence of six."""
    return ["".join(chr(97 + number // 26**place % 26) for place in range(5)) for number in range(count)]


def source(documents: list[str] | None = None, settings: TextSettings = SETTINGS, **more: Any) -> TextSource:
    return TextSource(words(60) if documents is None else documents, encode, END, settings, **more)


def sequences(batch: MicroBatch) -> Sequences:
    return [sample.prompt_ids + sample.completion_ids for sample in batch.samples]


def learned(found: TextSource, data_node: str = "a", iterations: int = 60) -> Sequences:
    return [
        sequence
        for iteration in range(iterations)
        for sequence in sequences(found.batch(data_node, iteration=iteration, agent=0, wave=0))
    ]


def fake_tokenizer(end: int | None = END) -> Any:
    def as_model_does(text: str, add_special_tokens: bool, verbose: bool) -> list[int]:
        return [0, *encode(text)] if add_special_tokens or verbose else encode(text)

    return SimpleNamespace(eos_token_id=end, encode=as_model_does)


def read(folder: Path, **settings: Any) -> TextSource:
    found = TextSettings(**{"sequence_tokens": 6, "batch_sequences": 1, **settings})
    return TextSource.read(folder, fake_tokenizer(), found, device=CPU, packed=False)


def test_documents_follow_each_other_with_an_end_token_behind_each() -> None:
    settings = TextSettings(sequence_tokens=4, batch_sequences=3)
    found = source(["ab", "cdefg", "", "hij"], settings)
    in_order = [[*encode("ab"), END, *encode("c")], [*encode("defg")], [END, *encode("hij")]]
    assert sorted(sequences(found.batch("a", iteration=0, agent=0, wave=0))) == sorted(map(tuple, in_order))


def test_all_tokens_but_the_first_of_a_sequence_are_predicted() -> None:
    batch = source().batch("a", iteration=0, agent=0, wave=0)
    assert batch.input_ids_BT.shape == (3, 6)
    assert batch.targets_N.tolist() == [t for row in batch.input_ids_BT.tolist() for t in row[1:]]
    assert batch.predictors_N.tolist() == [6 * row + place for row in range(3) for place in range(5)]


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_has_its_number_of_sequences_also_where_they_begin_alike(packed: bool) -> None:
    documents = ["a" * 3 + "bcdefghijklm"[n] + "nopqrstuvwxyz"[n] for n in range(12)]
    found = source(documents, TextSettings(6, 8), packed=packed)
    batch = found.batch("a", iteration=0, agent=0, wave=0)
    assert len(batch.targets_N) == 8 * 5
    assert (batch.layout is not None) is packed
    assert len(set(sequences(batch))) == 8


def test_the_same_name_gives_the_same_micro_batch_on_another_machine_too() -> None:
    one, other = source(), source()
    name = {"iteration": 7, "agent": 2, "wave": 1}
    assert sequences(one.batch("a", **name)) == sequences(other.batch("a", **name))


def test_what_is_drawn_depends_on_nothing_of_this_process() -> None:
    found = source([chr(97 + n) * 5 for n in range(20)], TextSettings(6, 4))
    batch = found.batch("a", iteration=0, agent=0, wave=0)
    assert [sequence[0] - 3 for sequence in sequences(batch)] == [17, 10, 2, 15]


@pytest.mark.parametrize("other", [{"data_node": "b"}, {"iteration": 1}, {"agent": 1}, {"wave": 1}])
def test_every_part_of_the_name_decides(other: dict[str, Any]) -> None:
    name = {"data_node": "a", "iteration": 0, "agent": 0, "wave": 0}
    found = source()
    assert sequences(found.batch(**name)) != sequences(found.batch(**{**name, **other}))


def test_another_seed_draws_other_text() -> None:
    one, other = source(), source(settings=TextSettings(6, 3, seed=1))
    assert learned(one, iterations=3) != learned(other, iterations=3)


def test_all_of_the_text_is_learned_from() -> None:
    found = source()
    assert found.sequences == 60
    assert (
        set(learned(found, iterations=300))
        == set(learned(found, "b", iterations=300))
        == {(*encode(word), END) for word in words(60)}
    )


def test_a_feed_gives_the_same_inputs_when_a_path_is_repaired() -> None:
    feed: Feed = TextFeed(source(), "a", iteration=4)
    first, again = feed.take(1, 0, (0, 1, 2)), feed.take(1, 0, (0, 2))
    assert first is not None
    assert again is not None
    assert (first.path, again.path) == ((0, 1, 2), (0, 2))
    assert sequences(first.batch) == sequences(again.batch)
    assert first.tokens == 15


@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_of_a_feed_is_that_of_the_mean_loss(tmp_path: Path, packed: bool) -> None:
    folder = saved(tiny_model("llama"), tmp_path)
    packs = try_cut(tiny_config("llama"))
    pipeline = LocalPipeline.load(folder, [2, 6], StageSettings(trainable="full"), packs=packs)
    feed = TextFeed(source(packed=packed), "a", iteration=0)
    taken = [inputs for agent in range(2) if (inputs := feed.take(agent, 0, (0, 1)))]
    losses = [pipeline.accumulate(inputs, feed.objective) for inputs in taken]
    undivided = [summed.of_step(1) for summed in pipeline.take_gradients()]
    for inputs in taken:
        pipeline.accumulate(inputs, cross_entropy(30))
    divided = [summed.of_step(30) for summed in pipeline.take_gradients()]
    for one, other in zip(undivided, divided, strict=True):
        for name, gradient in other.items():
            torch.testing.assert_close(one[name], gradient)
    per_token = sum(losses) / 30
    assert 2.0 < per_token < 3 * torch.tensor(float(VOCABULARY)).log().item()


def test_a_folder_is_read_in_the_order_of_its_names_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "z.txt").write_text("zzzzz")
    (tmp_path / "a" / "b.txt").write_text("bbbbb")
    (tmp_path / ".git" / "config").write_text("ccccc")
    (tmp_path / ".hidden").write_text("ddddd")
    assert read(tmp_path, batch_sequences=2).sequences == 2
    ordered = read(tmp_path, sequence_tokens=12).batch("a", iteration=0, agent=0, wave=0)
    assert sequences(ordered) == [(*encode("bbbbb"), END, *encode("zzzzz"), END)]


def test_a_models_own_tokenizer_reads_the_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_quick_tiny(tmp_path / "models"))
    (tmp_path / "a.txt").write_text("<|end|>\u00e4" * 200)
    settings = TextSettings(sequence_tokens=9, batch_sequences=1)
    found = TextSource.read(tmp_path / "a.txt", tokenizer, settings, device=CPU, packed=False)
    batch = found.batch("a", iteration=0, agent=0, wave=0)
    assert found.sequences == 200
    assert sequences(batch) == [tuple("<|end|>\u00e4".encode())]
    assert caplog.text == ""


def test_one_file_may_be_named_instead(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcde")
    assert read(tmp_path / "a.txt").sequences == 1


def test_a_folder_that_is_not_there_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no text in"):
        read(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"picture\.png is not a text file: byte 0 is not UTF-8"):
        read(tmp_path)


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs a file that even root cannot read")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.txt").symlink_to(UNREADABLE)
    with pytest.raises(ConfigError, match=r"cannot read the text .*broken\.txt: Input/output error"):
        read(tmp_path)


def test_more_text_than_fits_is_an_error_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("abcde")
    (tmp_path / "b.txt").write_text("abcde" * 100)
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 500)
    with pytest.raises(ConfigError, match="larger than 500 bytes"):
        read(tmp_path)
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 505)
    assert read(tmp_path).sequences == 84


@pytest.mark.parametrize("documents", [[], [""], ["abc"], words(2)])
def test_text_too_short_for_one_micro_batch_is_an_error(documents: list[str]) -> None:
    tokens = sum(len(document) + 1 for document in documents if document)
    with pytest.raises(ConfigError, match=f"the text has {tokens} tokens.*use more text"):
        source(documents)


def test_a_tokenizer_without_an_end_token_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcde")
    with pytest.raises(ConfigError, match="no end token"):
        TextSource.read(tmp_path, fake_tokenizer(None), SETTINGS, device=CPU, packed=False)
