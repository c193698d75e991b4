"""Each verifier of IFEval with an answer that follows its instruction and one that does not."""

from typing import Any

import pytest

from swarmnode.extensions.suites.instructions import (
    VERIFIERS,
    fault_of_instructions,
    follows_all,
    unknown_instruction,
)

MORE, LESS = "at least", "less than"

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sea", "Sky"]}, "Sea and sky", "the sea"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": MORE}, "a b a", "a b"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "a season", "the Sea!"),
    (
        "keywords:letter_frequency",
        {"letter": "x", "let_frequency": 2, "let_relation": LESS},
        "x marks it",
        "xX",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": MORE}, "One. Two!", "One 2.5"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, "two words", "not two words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        'First.\n\n"Then, it was.',
        "First.\n\nNow then.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [street]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. Yours", "Bye. PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S Yours", "P.S. Yours"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<A day>>\nIt was", "<< >>\nIt was"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So "The end."', "The end. So"),
    ("startend:quotation", {}, ' "all of it" ', '"some" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": LESS},
        "ONE word",
        "TWO WORDS",
    ),
    ("change_case:english_capital", {}, "ALL OF IT", "ALL of IT"),
    ("change_case:english_lowercase", {}, "all of it", "All of it"),
    ("punctuation:no_comma", {}, "one two", "one, two"),
]


def asked(*instructions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    names, arguments = zip(*instructions, strict=True)
    return {"instruction_id_list": list(names), "kwargs": list(arguments)}


@pytest.mark.parametrize(("name", "arguments", "follows", "fails"), CASES)
def test_who_follows_an_instruction_is_told_from_who_does_not(
    name: str, arguments: dict[str, Any], follows: str, fails: str
) -> None:
    columns = asked((name, arguments))
    assert unknown_instruction(columns) is None
    assert follows_all(follows, columns)
    assert not follows_all(fails, columns)
    assert not follows_all("  ", columns)


def test_every_verifier_is_tried() -> None:
    assert {name for name, *_ in CASES} == set(VERIFIERS)


def test_all_instructions_must_be_followed() -> None:
    columns = asked(("punctuation:no_comma", {}), ("change_case:english_lowercase", {}))
    assert follows_all("one two", columns)
    assert not follows_all("one, two", columns)


def test_what_nobody_can_verify_is_unknown() -> None:
    assert unknown_instruction(asked(("language:response_language", {"language": "fi"})))
    without = unknown_instruction(asked(("length_constraints:number_words", {"num_words": 3})))
    assert without == "length_constraints:number_words without relation"


def test_arguments_that_a_parquet_file_fills_with_none_are_none() -> None:
    columns = asked(("punctuation:no_comma", {"num_words": None, "relation": None}))
    assert unknown_instruction(columns) is None
    assert follows_all("fine", columns)


def test_lists_that_do_not_belong_together_are_a_fault() -> None:
    assert fault_of_instructions({"instruction_id_list": ["a:b"], "kwargs": []})
    assert fault_of_instructions({"instruction_id_list": [3], "kwargs": [{}]})
    assert fault_of_instructions({"instruction_id_list": ["a:b"], "kwargs": ["c"]})
    assert fault_of_instructions({"instruction_id_list": ["a:b"], "kwargs": [None]}) is None
