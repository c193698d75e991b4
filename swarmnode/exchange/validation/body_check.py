"""Checks of bodies: drawn again, tokenized and scored on this machine.

BodyTransfer -> Judge.run([check_body]) -> buffer -> trainer

They call the task and the tokenizer, so they run in a thread with a deadline (judge.py): no answer can stall
the event loop. Everything is checked before anything is kept; Rejected names the Reason.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.chat import Prompt
from swarmnode.errors import JudgementOverran, Rejected, TaskError
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.limits import CLAIM_TOLERANCE, MAX_CHARS_PER_TOKEN
from swarmnode.exchange.messages import Announcement, Answer, Body, Header, decode_body, fingerprint
from swarmnode.exchange.validation.episode_reader import EncodeTurns, EpisodeReader
from swarmnode.tasks.task import Task, is_environment, redraw, score_strictly
from swarmnode.types import (
    Completion,
    Example,
    FinishReason,
    RolloutGroup,
    Scores,
    fully_scored,
    one_span,
)

Encode = Callable[[str, FinishReason], tuple[int, ...]]
"""The local policy's tokens of a completion, with its EOS token if the finish is "stop", which strangers'
answers are never taken to have."""

PromptIds = Callable[[Prompt], tuple[int, ...]]
"""The local policy's tokens of a prompt, chat template included."""


@dataclass(frozen=True, slots=True)
class BodyRules:
    """The standards of check_body: our tasks, our tokenizer, our limits."""

    tasks: Mapping[str, Task]
    encode: Encode
    prompt_ids: PromptIds
    max_prompt_tokens: int
    max_tokens: int
    encode_turns: EncodeTurns | None = None
    """The local policy's tokens of an episode. None: groups of environments are not used."""
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A group ready for training, and the fingerprint of its answers."""

    group: RolloutGroup
    fingerprint: bytes
    false_claim: str = ""
    """The author's claim about its rewards, and ours, if they differ. Empty: they agree."""


def open_body(data: bytes, author: str, header: Header) -> Body:
    """Returns the body in `data`, which must belong to this author's header. Raises Rejected."""
    body = decode_body(data)
    if (body.author, body.key, len(body.answers)) != (author, header.key, header.group_size):
        raise Rejected(Reason.BODY_MISMATCH, "the body belongs to another header")
    return body


def check_body(data: bytes, announcement: Announcement, rules: BodyRules) -> CheckedBody:
    """Redraws the example, then tokenizes and scores the answers. Raises Rejected. Blocks while the task
    works."""
    header = announcement.header
    body = open_body(data, announcement.author, header)
    task = rules.tasks[header.task]
    try:
        group = _judged(body.answers, task, announcement, rules)
    except JudgementOverran as error:
        if not is_environment(task):
            raise
        # The environment may be slow for everybody, without its author knowing.
        raise Rejected(Reason.PLAY_TIMEOUT, error.message) from error
    if all(reward is None for reward in group.rewards):
        raise Rejected(Reason.JUDGE_BUSY, "our judge gave no score to any of its answers")
    return CheckedBody(group, fingerprint(body), false_claim(header, group))


def _judged(
    answers: Sequence[Answer], task: Task, announcement: Announcement, rules: BodyRules
) -> RolloutGroup:
    header = announcement.header
    example = _redraw(task, header)
    _check_prompt(example.prompt, rules)
    completions, scores = _read_and_score(answers, task, example, header.policy_version, rules)
    return RolloutGroup(example, completions, scores, announcement.author, header.policy_version)


def require_advantage(group: RolloutGroup) -> None:
    """Raises Rejected if all rewards are equal (SAPO's filter): such a group teaches nothing."""
    if not group.has_gradient:
        raise Rejected(Reason.ZERO_ADVANTAGE)


def false_claim(header: Header, group: RolloutGroup) -> str:
    """Returns a description of what is wrong with the rewards that a group was announced with. Empty:
    nothing."""
    if not is_false_claim(header, group):
        return ""
    claimed, own = (
        "none" if mean is None else f"{mean:.3g}" for mean in (header.reward_mean, group.reward_mean)
    )
    return (
        f"{header.task}: its author claims a mean reward of {claimed}, our judge gives {own}; rewards that"
        " differ between machines also cause this"
    )


def is_false_claim(header: Header, group: RolloutGroup) -> bool:
    """Returns True if the author announced other rewards than our judge gives. `group` has the answers that
    were judged. If some are missing, or our judge had no time for all rewards of some, it returns True only
    if no rewards of theirs could make the claim true."""
    scored = zip(group.rewards, fully_scored(group.scores), strict=True)
    rewards = [reward for reward, is_scored in scored if is_scored and reward is not None]
    if len(rewards) < header.group_size:
        return _contradicts(header, rewards)
    return _differ(header.reward_mean, group.reward_mean) or _differ(header.reward_std, group.reward_std)


def _differ(claimed: float | None, own: float | None) -> bool:
    if claimed is None or own is None:
        return claimed is not own
    return abs(claimed - own) > CLAIM_TOLERANCE * max(1.0, abs(own))


def _contradicts(header: Header, rewards: Sequence[float]) -> bool:
    """Returns True if the judged part rules out the claimed mean and spread. The other rewards' deviations
    from that mean must sum to the opposite of the judged part's sum, and their squares to what it leaves of
    the total: Cauchy-Schwarz tells if that many numbers can. An honest author's claim is never ruled out."""
    if header.reward_mean is None or header.reward_std is None:
        return bool(rewards)
    # We cannot know whether the author's judge scored the answers that ours did not.
    scored = header.group_size
    deviations = [reward - header.reward_mean for reward in rewards]
    std = header.reward_std + CLAIM_TOLERANCE * max(1.0, header.reward_std)
    rounding = len(rewards) * CLAIM_TOLERANCE * max(1.0, abs(header.reward_mean))
    left = scored * std**2 - sum(deviation**2 for deviation in deviations)
    opposite = max(0.0, abs(sum(deviations)) - rounding)
    return left < 0 or opposite**2 > (scored - len(rewards)) * left


def _redraw(task: Task, header: Header) -> Example:
    try:
        return redraw(task, header.key)
    except TaskError as error:
        raise Rejected(Reason.NOT_DRAWABLE, error.message) from error


def _check_prompt(prompt: Prompt, rules: BodyRules) -> None:
    # The author's policy may take longer prompts than ours, or its tokenizer may need fewer tokens for them.
    length = len(rules.prompt_ids(prompt))
    if length > rules.max_prompt_tokens:
        raise Rejected(
            Reason.LONG_PROMPT, f"a prompt of {length} tokens; our limit is {rules.max_prompt_tokens}"
        )


def _read_and_score(
    answers: Sequence[Answer], task: Task, example: Example, policy_version: int, rules: BodyRules
) -> tuple[tuple[Completion, ...], tuple[Scores, ...]]:
    """Returns the answers in our tokens, and their scores.

    Answers that are too long for us are left out, because nobody knows other nodes' tokens: text of an honest
    policy that samples half a character has more tokens when it is read again. If half of the answers read or
    more are too long, their author makes us read for nothing. Raises Rejected.
    """
    reader = _make_reader(task, example, policy_version, rules)
    read = reader.read(answers)
    completions = tuple(completion for completion in read if completion is not None)
    unfit = len(read) - len(completions)
    if unfit >= len(completions):
        longest = (
            f"have more tokens in our tokenizer than we allow (our rollout.max_tokens = {rules.max_tokens});"
            " its author may have sampled fewer, or use another tokenizer"
        )
        fault = longest if reader.refusal == Reason.TOO_LONG else "end differently when we replay them"
        raise Rejected(reader.refusal, f"{task.name}: {unfit} of {len(read)} answers {fault}")
    scores = _score(task, example, completions)
    if not any(completion.token_ids for completion in completions):
        raise Rejected(Reason.NO_TOKENS, "answers without a token")
    return completions, scores


@dataclass(slots=True)
class _TextReader:
    """Reads answers that each consist of one text."""

    policy_version: int
    rules: BodyRules
    refusal: Reason = Reason.TOO_LONG

    def read(self, answers: Sequence[Answer]) -> list[Completion | None]:
        # A policy that knows the answer gives it again and again.
        different = {answer.text: answer for answer in answers}
        read = {text: _completion(one, self.policy_version, self.rules) for text, one in different.items()}
        return [read[answer.text] for answer in answers]


def _make_reader(
    task: Task, example: Example, policy_version: int, rules: BodyRules
) -> EpisodeReader | _TextReader:
    """Returns the reader for the answers to an example; answers to an environment are played again."""
    if not is_environment(task):
        return _TextReader(policy_version, rules)
    if rules.encode_turns is None:
        raise Rejected(Reason.UNSCORABLE, "this node does not play episodes")
    longest = rules.max_tokens
    return EpisodeReader(task, example, policy_version, rules.encode_turns, longest, rules.clock)


def _completion(answer: Answer, policy_version: int, rules: BodyRules) -> Completion | None:
    """Returns a stranger's answer in our tokens, without the end that it claims. None: it is too long for us.

    Text can be judged again here, `finish` cannot. Right answers marked "length" and wrong ones marked "stop"
    would make EOS the token that tells them apart, and the policy would unlearn it: a tiny policy fell from
    0.73 to 0.44 in 90 s. The other rules that were tried can still be exploited. Believing `finish` in groups
    where all claim "stop", or ending every answer with EOS because our judge saw the text end there, makes
    the credit on EOS sum to zero over the group. But that holds only for losses that weigh tokens alike (a
    loss that divides by length weighs the EOS of short answers more, and authors choose lengths), and an
    answer that fills our limit has no room for EOS. Marking only right answers as ended would teach the
    policy to stop early. Our policy learns when to stop from its own answers, half of each batch or more,
    whose ends are known. Under the attack (16 own and 16 such groups a round, 24 rounds) held-out reward was
    0.24 with the claim believed, 0.39 with EOS everywhere, 0.56 with none; among three honest nodes 0.61,
    0.67 and 0.67. (That is for groups that are trained on as they are. After single answers that our judge
    gave full marks, our own end may be taught, whatever was claimed: book_rule.py.)

    So `finish` is "length" here, which says, as everywhere, that no EOS is among the tokens. An answer that
    is nothing but its end has no tokens: it counts in its group's mean and is not trained on.
    """
    if not isinstance(answer.text, str):
        raise Rejected(Reason.MALFORMED_BODY, "turns for a task that is not an environment")
    if len(answer.text) > rules.max_tokens * MAX_CHARS_PER_TOKEN:
        return None  # without being tokenized, which would take seconds
    token_ids = rules.encode(answer.text, "length")
    if len(token_ids) > rules.max_tokens:
        return None
    spans = one_span(policy_version, len(token_ids))
    return Completion(answer.text, token_ids, None, spans, "length")


def _score(task: Task, example: Example, completions: Sequence[Completion]) -> tuple[Scores, ...]:
    # Judges that compare answers are not used on strangers', so each answer's score does not depend on the
    # others.
    different = list(dict.fromkeys(completion.said for completion in completions))
    try:
        scores = dict(zip(different, score_strictly(task, example, different), strict=True))
        return tuple(scores[completion.said] for completion in completions)
    except TaskError as error:
        raise Rejected(Reason.UNSCORABLE, error.message) from error
