"""IFEval's instructions, each with a verifier that reads the answer and nothing else (Zhou et al. 2023).

instruction_id_list, kwargs -> [unknown_instruction] -> suite.py;  completion -> [follows_all] -> formats.py

An instruction without a verifier makes its question unknown, never right. These stay without one: the
language of an answer. Sentences and capital words are counted without nltk, so a long answer may be counted
otherwise than by the original, and that a text in one case is English is taken on trust.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmnode.extensions.suites.suite_rows import Columns

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verifier:
    """The verifier of one instruction, and the arguments that it needs."""

    follows: Callable[[str, Arguments], bool]
    needs: Mapping[str, type]


def unknown_instruction(columns: Columns) -> str | None:
    """Returns the first instruction of a question that has no verifier here, or None."""
    for name, arguments in _instructions(columns):
        verifier = VERIFIERS.get(name)
        if verifier is None:
            return name
        for key, kind in verifier.needs.items():
            if not isinstance(arguments.get(key), kind):
                return f"{name} without {key}"
    return None


def follows_all(text: str, columns: Columns) -> bool:
    """Returns True if an answer that is not empty follows every instruction. All of them must have a
    verifier."""
    return bool(text.strip()) and all(
        VERIFIERS[name].follows(text, arguments) for name, arguments in _instructions(columns)
    )


def fault_of_instructions(columns: Columns) -> str | None:
    """Returns the defect in the lists of a row, or None."""
    names, arguments = columns["instruction_id_list"], columns["kwargs"]
    if not names or not all(isinstance(name, str) for name in names):
        return "instruction_id_list names no instruction"
    if len(names) != len(arguments):
        return f"{len(names)} instructions but kwargs of {len(arguments)}"
    if not all(one is None or isinstance(one, dict) for one in arguments):
        return "kwargs is not a list of objects"
    return None


def _instructions(columns: Columns) -> list[tuple[str, Arguments]]:
    """Yields names with arguments. A Parquet file has every argument in every row: None marks those that an
    instruction does not have."""
    pairs: zip[tuple[str, Arguments | None]] = zip(
        columns["instruction_id_list"], columns["kwargs"], strict=True
    )
    return [
        (name, {key: value for key, value in (given or {}).items() if value is not None})
        for name, given in pairs
    ]


def _compared(count: int, wanted: int, relation: str) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def _keywords(text: str, given: Arguments) -> bool:
    return all(str(word).lower() in text.lower() for word in given["keywords"])


def _keyword_count(text: str, given: Arguments) -> bool:
    count = text.lower().count(given["keyword"].strip().lower())
    return _compared(count, given["frequency"], given["relation"])


def _no_forbidden_word(text: str, given: Arguments) -> bool:
    words = [re.escape(str(word)) for word in given["forbidden_words"]]
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in words)


def _letter_count(text: str, given: Arguments) -> bool:
    count = text.lower().count(given["letter"].lower())
    return _compared(count, given["let_frequency"], given["let_relation"])


def _sentences(text: str, given: Arguments) -> bool:
    ends = re.findall(r"[.!?][\"')\]]*(?=\s|$)", text.strip())
    rest = bool(text.strip()) and not re.search(r"[.!?][\"')\]]*$", text.strip())
    return _compared(len(ends) + rest, given["num_sentences"], given["relation"])


def _paragraphs(text: str, given: Arguments) -> bool:
    parts = [part.strip() for part in text.split("***")]
    inner = parts[1:-1] if len(parts) > 2 else []
    return all(inner) and sum(map(bool, parts)) == given["num_paragraphs"]


def _word_count(text: str, given: Arguments) -> bool:
    return _compared(len(re.findall(r"\w+", text)), given["num_words"], given["relation"])


def _first_word(text: str, given: Arguments) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    nth: int = given["nth_paragraph"]
    if len(paragraphs) != given["num_paragraphs"] or not 1 <= nth <= len(paragraphs):
        return False
    first = re.match(r"['\"]*([^\s.,?!'\"]*)", paragraphs[nth - 1])
    return first is not None and first[1].lower() == given["first_word"].lower()


def _placeholders(text: str, given: Arguments) -> bool:
    return len(re.findall(r"\[[^\]\n]*\]", text)) >= given["num_placeholders"]


def _postscript(text: str, given: Arguments) -> bool:
    spaced = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    marker: str = given["postscript_marker"]
    return bool(re.search(spaced.get(marker, re.escape(marker.lower())), text.lower()))


def _bullets(text: str, given: Arguments) -> bool:
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(re.match(r"\*[^*]|-", line)) for line in lines) == given["num_bullets"]


def _one_of_three(text: str, given: Arguments) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def _highlights(text: str, given: Arguments) -> bool:
    single = [found for found in re.findall(r"\*([^\n*]*)\*", text) if found.strip()]
    double = [found for found in re.findall(r"\*\*([^\n*]*)\*\*", text) if found.strip()]
    return len(single) + len(double) >= given["num_highlights"]


def _sections(text: str, given: Arguments) -> bool:
    splitter = re.escape(given["section_spliter"].strip())
    return len(re.findall(rf"{splitter}\s?\d+", text)) >= given["num_sections"]


def _json(text: str, given: Arguments) -> bool:
    fenced = re.fullmatch(r"```(?:json|Json|JSON)?(.*)```", text.strip(), re.DOTALL)
    try:
        msgspec.json.decode((fenced[1] if fenced else text).strip())
    except (msgspec.DecodeError, UnicodeError):
        return False
    return True


def _title(text: str, given: Arguments) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^\n<>]+)>>", text))


def _two_responses(text: str, given: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _repeats(text: str, given: Arguments) -> bool:
    return text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


def _ends(text: str, given: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def _quoted(text: str, given: Arguments) -> bool:
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _capital_words(text: str, given: Arguments) -> bool:
    count = sum(word.isupper() for word in re.findall(r"\w[\w'-]*", text))
    return _compared(count, given["capital_frequency"], given["capital_relation"])


VERIFIERS: Mapping[str, Verifier] = {
    "keywords:existence": Verifier(_keywords, {"keywords": list}),
    "keywords:frequency": Verifier(_keyword_count, {"keyword": str, "frequency": int, "relation": str}),
    "keywords:forbidden_words": Verifier(_no_forbidden_word, {"forbidden_words": list}),
    "keywords:letter_frequency": Verifier(
        _letter_count, {"letter": str, "let_frequency": int, "let_relation": str}
    ),
    "length_constraints:number_sentences": Verifier(_sentences, {"num_sentences": int, "relation": str}),
    "length_constraints:number_paragraphs": Verifier(_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": Verifier(_word_count, {"num_words": int, "relation": str}),
    "length_constraints:nth_paragraph_first_word": Verifier(
        _first_word, {"num_paragraphs": int, "nth_paragraph": int, "first_word": str}
    ),
    "detectable_content:number_placeholders": Verifier(_placeholders, {"num_placeholders": int}),
    "detectable_content:postscript": Verifier(_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": Verifier(_bullets, {"num_bullets": int}),
    "detectable_format:constrained_response": Verifier(_one_of_three, {}),
    "detectable_format:number_highlighted_sections": Verifier(_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": Verifier(_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": Verifier(_json, {}),
    "detectable_format:title": Verifier(_title, {}),
    "combination:two_responses": Verifier(_two_responses, {}),
    "combination:repeat_prompt": Verifier(_repeats, {"prompt_to_repeat": str}),
    "startend:end_checker": Verifier(_ends, {"end_phrase": str}),
    "startend:quotation": Verifier(_quoted, {}),
    "change_case:capital_word_frequency": Verifier(
        _capital_words, {"capital_frequency": int, "capital_relation": str}
    ),
    "change_case:english_capital": Verifier(lambda text, given: text.isupper(), {}),
    "change_case:english_lowercase": Verifier(lambda text, given: text.islower(), {}),
    "punctuation:no_comma": Verifier(lambda text, given: "," not in text, {}),
}
