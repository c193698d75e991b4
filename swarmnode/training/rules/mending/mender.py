"""Mends strangers' answers with a node's own policy and its own copy of the task.

book_rule.py -> [Mender] -> mending.py (what to cut), odd_pieces.py (where to look closer)

The training thread waits for the judge, but no longer than the exchange does: the process of a task file
kills a call that overruns, and the functions of a script are abandoned in their own thread. Once a judge is
lost, no more answers to its task are examined in that round; if it overran on an author's text, that author's
doubtful answers are never examined again.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import JudgementLost, JudgementOverran, TaskError
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.rollout.renderer import Renderer
from swarmnode.tasks.deadlines.timed_threads import TimedThreads
from swarmnode.tasks.task import Task, score_strictly
from swarmnode.training.rules.book import BookCandidate
from swarmnode.training.rules.mending.mending import ForeignAnswer, MendedAnswer, Read, mend
from swarmnode.training.rules.mending.odd_pieces import OddPieces
from swarmnode.types import total_reward

logger = logging.getLogger(__name__)

MOST_NAMES = 1024
"""The most authors remembered for having hung a judge, or for having been logged."""


class Mender:
    """Implements `Mend` of book.py: call it with foreign answers of full marks, in the training thread."""

    def __init__(
        self, read: Read, tasks: Mapping[str, Task], renderer: Renderer, *, judge_limit_s: float = 60.0
    ) -> None:
        """`read`: reads rows with our current policy. `tasks`: the tasks by name, as strangers' answers are
        judged. `judge_limit_s`: the longest time of one call of the judge."""
        self._read = read
        self._tasks = tasks
        self._renderer = renderer
        self._threads = TimedThreads(judge_limit_s)
        self._pieces = OddPieces()
        self._hung_by = BoundedDict[str, None](MOST_NAMES)
        """Authors whose text hung a judge."""
        self._lost: set[str] = set()
        """Tasks whose judge was lost in this round."""
        self._logged = BoundedDict[str, None](MOST_NAMES)

    def __call__(self, answers: Sequence[BookCandidate]) -> list[BookCandidate]:
        """Returns the answers, some of them cut, without the ones that must not be learnt from."""
        self._lost.clear()
        # A conversation's turns were answered as they stand: nothing can be cut out of them.
        whole = [answer for answer in answers if answer.entry.in_turns]
        answers = [answer for answer in answers if not answer.entry.in_turns]
        if not answers:
            return whole
        for answer in answers:
            self._pieces.add(answer.entry.task, answer.entry.author, answer.entry.token_ids)
        foreign = [self._foreign(answer) for answer in answers]
        results = mend(foreign, read=self._read, judge=self._judge, tokens=self._renderer)
        kept = whole
        for answer, result in zip(answers, results, strict=True):
            if result.outcome == "mended":
                self._log_first(result)
                entry = msgspec.structs.replace(answer.entry, token_ids=result.token_ids)
                kept.append(BookCandidate(answer.example, result.text, entry))
            elif result.outcome == "untouched":
                kept.append(answer)
        return kept

    def _foreign(self, answer: BookCandidate) -> ForeignAnswer:
        entry = answer.entry
        return ForeignAnswer(
            answer.example,
            entry.author,
            self._renderer.prompt_ids(answer.example.prompt),
            entry.token_ids,
            answer.text,
            self._pieces.odd_places(entry.task, entry.author, entry.token_ids),
        )

    def _judge(self, answer: ForeignAnswer, texts: Sequence[str]) -> list[float | None]:
        """Returns the rewards of the texts; None for all of them if the judge is lost or fails on one."""
        task, unknown = answer.example.key.task, list[float | None]([None] * len(texts))
        if answer.author in self._hung_by or task in self._lost:
            return unknown
        try:
            judge = partial(score_strictly, self._tasks[task], answer.example, texts)
            scores = self._threads.result_of(judge, f"the reward of task {task}")
        except JudgementLost as lost:
            self._lost.add(task)
            if isinstance(lost, JudgementOverran):
                who = _named(answer.author)
                logger.info("no longer examining doubtful answers of %s: %s", who, lost)
                self._hung_by[answer.author] = None
            return unknown
        except TaskError as error:
            # Parts of a stranger's text may be what no policy writes: not the task's fault.
            logger.debug("cannot judge part of an answer of %s: %s", answer.author, error)
            return unknown
        return [total_reward(named) for named in scores]

    def _log_first(self, result: MendedAnswer) -> None:
        """Logs the first mended answer of each author."""
        author = result.source.author
        if author in self._logged:
            return
        self._logged[author] = None
        logger.info(
            "right answers of %s are cut to what they need before training on them, such as %.60r to %.60r",
            _named(author),
            result.source.text,
            result.text,
        )


def _named(author: str) -> str:
    return f"{memorable_name(author)} ({author})"
