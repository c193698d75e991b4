"""Why something was not used, in words for a person. Metrics and JSON keep the short codes.

node_status.py: counters by code (exchange/drop_reasons.py:Reason) -> [in_words] -> panel, page, report
"""

from collections.abc import Mapping

from swarmnode.exchange.drop_reasons import Reason

WORDS: dict[str, str] = {
    Reason.RATE_LIMITED: "too many from one peer",
    Reason.OVER_CAPACITY: "more than we can hear",
    Reason.OTHER_TASK: "of tasks that we do not have",
    Reason.OTHER_VERSION: "of other versions of our tasks",
    Reason.TOO_LONG: "answers longer in our tokenizer than we take (rollout.max_tokens)",
    Reason.LONG_PROMPT: "questions longer than we take (rollout.max_prompt_tokens)",
    Reason.NO_SPREAD: "claimed equal rewards",
    Reason.OVERSIZED: "larger than we take",
    Reason.EXPIRED: "announced too long ago",
    Reason.DUPLICATE: "heard before",
    Reason.BEFORE_OUR_TIME: "older than this node",
    Reason.UNAVAILABLE: "could not be fetched",
    Reason.TIMEOUT: "fetched too slowly",
    Reason.NOT_DRAWABLE: "no such question here",
    Reason.UNSCORABLE: "our judge gave no score",
    Reason.SCORE_TIMEOUT: "judged too slowly",
    Reason.PLAY_TIMEOUT: "played too slowly",
    Reason.ZERO_ADVANTAGE: "equal rewards",
    Reason.INTERNAL: "a defect of ours",
    Reason.FALSE_CLAIM: "claimed other rewards than ours",
    Reason.STALE: "too old to train on",
    Reason.CROWDED_OUT: "not needed, newer ones took their place",
    Reason.OVER_SHARE: "too many of one author",
    Reason.UPLOAD_LIMITED: "our upload was full",
    Reason.PRIVATE: "stays at home",
    Reason.PACED: "more than others would hear",
    Reason.HOST_DOWN: "the network was down",
}
"""Codes that do not speak for themselves; of others the underscores are left out."""


def in_words(counts: Mapping[str, int]) -> str:
    """Returns the counters in one line, the largest first.

    >>> in_words({"stale": 3, "bad_signature": 41})
    '41 bad signature, 3 too old to train on'
    """
    most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return (
        ", ".join(f"{count} {WORDS.get(code, code.replace('_', ' '))}" for code, count in most_first)
        or "nothing"
    )
