"""Who may teach: authors are measured before anything of theirs is learnt."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from swarmnode.training.rules.book import Entry
from swarmnode.training.rules.book_rule import BookRule
from swarmnode.training.rules.lessons import SharingRule
from swarmnode.training.rules.teachers import (
    ANSWERS,
    AUTHORS_A_ROUND,
    BATCH,
    BATCH_OF_TEACHER,
    DOUBT,
    FINDS_OF_ONE,
    FINDS_OF_TASK,
    LEAST_ANSWERS,
    LEAST_FINDS,
    LEAST_MEASURED,
    MAX_AUTHORS,
    MAX_HELD,
    ON_TRUST,
    PATIENCE,
    PROVEN,
    SURPRISING,
    THRESHOLD,
    UNKNOWN_GROUND,
    Comparison,
    SavedAuthor,
    Teachers,
)
from swarmnode.training.rules.teachers import (
    FINDS as FINDS_IN_ALL,
)
from tests.answered import foreign, own

HONEST, LIAR = 0.08, -0.06


def entry(number: int, author: str = "me", task: str = "sum") -> Entry:
    return Entry(task, "1", 0, number, f"{number}=", (number + 2,), 1.0, author, author == "me", False)


FINDS = [entry(number) for number in range(LEAST_FINDS)]


def agreement(teachers: Teachers, author: str) -> float | None:
    """The running mean of an author. None: nobody has measured him."""
    return next((one.mean for one in teachers.saved() if one.author == author and one.measured), None)


def teaches(teachers: Teachers, author: str) -> bool:
    """Returns True if his answers may be learnt from."""
    return any(one.author == author and (one.admitted or one.trusted > 0) for one in teachers.saved())


class Known:
    """Cosines by author, as they are from now on; it counts who was measured. Nobody surprises us but those
    who are named."""

    def __init__(self, *surprising: str, **agreements: float) -> None:
        self.surprising, self.agreements = surprising, agreements
        self.measured: list[str] = []

    def __call__(self, finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[Comparison | None]:
        authors = [one[0].author for one in lists]
        self.measured += authors
        return [
            Comparison(self.agreements.get(author, HONEST), SURPRISING if author in self.surprising else 0.0)
            for author in authors
        ]


class Sends:
    """New answers of an author, round after round."""

    def __init__(self, teachers: Teachers, finds: Sequence[Entry] = FINDS) -> None:
        self.teachers, self.finds, self.number = teachers, finds, 1000
        self.in_book: list[Entry] = []

    def rounds(self, count: int, *authors: str, each: int = BATCH, task: str = "sum") -> set[str]:
        """Returns the authors of whom something entered."""
        entered = set[str]()
        for _ in range(count):
            given = list[Entry]()
            for author in authors:
                given += [entry(self.number + place, author, task) for place in range(each)]
                self.number += each
            ruling = self.teachers.rule_on(given, self.finds, random.Random(self.number))
            self.in_book += ruling.enter
            entered |= {one.author for one in ruling.enter}
            left = [one for one in self.in_book if one.author in ruling.leave]
            self.in_book = [one for one in self.in_book if one.author not in ruling.leave]
            self.teachers.take_back(left)
        return entered


def test_who_agrees_with_what_we_found_is_admitted_and_who_does_not_never_is() -> None:
    teachers = Teachers(Known(honest=HONEST, liar=LIAR))
    sends = Sends(teachers)
    assert sends.rounds(LEAST_MEASURED - 1, "honest", "liar") == set(), "nothing is learnt before"
    assert sends.rounds(60, "honest", "liar") == {"honest"}
    assert (teachers.teaching, teachers.waiting) == (1, 1)
    assert agreement(teachers, "honest") == pytest.approx(HONEST)
    assert agreement(teachers, "unheard") is None


def test_who_surprises_us_and_agrees_a_little_needs_more_measurements_than_others() -> None:
    """Chance brings one of three liars to that after three."""
    a_little, much = THRESHOLD + DOUBT / 2, THRESHOLD + 2 * DOUBT
    teachers = Teachers(Known("odd", "odd_and_right", odd=a_little, usual=a_little, odd_and_right=much))
    sends = Sends(teachers)
    assert sends.rounds(LEAST_MEASURED, "odd", "usual", "odd_and_right") == {"usual", "odd_and_right"}
    assert sends.rounds(PROVEN - LEAST_MEASURED, "odd") == {"odd"}


def test_what_is_likely_to_us_is_no_ground_to_be_admitted() -> None:
    sends = Sends(Teachers(Known(likely=LIAR)))
    assert sends.rounds(2 * PROVEN, "likely") == set()


def test_a_new_teacher_is_measured_as_often_as_who_waits() -> None:
    cosines = Known()
    sends = Sends(Teachers(cosines))
    sends.rounds(PROVEN, "new")
    assert len(cosines.measured) == PROVEN
    sends.rounds(10 * BATCH_OF_TEACHER // BATCH, "new")
    assert len(cosines.measured) == PROVEN + 10


def test_what_waited_enters_with_its_author() -> None:
    sends = Sends(Teachers(Known()))
    sends.rounds(LEAST_MEASURED, "honest")
    assert len(sends.in_book) == LEAST_MEASURED * BATCH


def test_of_who_has_much_to_show_one_measurement_of_all_of_it_counts_for_several() -> None:
    much = LEAST_MEASURED * LEAST_ANSWERS
    finds = [entry(number, task=f"task {number % 6}") for number in range(LEAST_MEASURED * FINDS_OF_ONE)]
    assert Sends(Teachers(Known()), finds).rounds(1, "honest", each=much) == {"honest"}
    assert Sends(Teachers(Known()), finds).rounds(1, "honest", each=much - 1) == set(), "few answers of his"
    assert Sends(Teachers(Known()), finds[1:]).rounds(1, "honest", each=much) == set(), "few finds of ours"
    sends = Sends(Teachers(Known(liar=LIAR)), finds)
    assert sends.rounds(30, "liar", each=much) == set()


def test_all_of_our_newest_finds_are_what_he_is_compared_with() -> None:
    seen = set[int]()

    def compare(finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[Comparison | None]:
        seen.update(one.index for one in finds)
        return [None] * len(lists)

    Sends(Teachers(compare), [entry(number) for number in range(40)]).rounds(1, "honest")
    assert seen == set(range(40 - FINDS_OF_TASK, 40))


def test_few_answers_are_no_measurement() -> None:
    cosines = Known()
    sends = Sends(Teachers(cosines))
    sends.rounds(1, "honest", each=LEAST_ANSWERS - 1)
    assert cosines.measured == []
    sends.rounds(1, "honest", each=1)
    assert cosines.measured == ["honest"]


def test_who_rises_is_admitted() -> None:
    cosines = Known(late=LIAR)
    sends = Sends(Teachers(cosines))
    assert sends.rounds(10, "late") == set()
    cosines.agreements["late"] = HONEST
    assert sends.rounds(30, "late") == {"late"}


def test_first_measurements_that_were_noise_are_forgotten() -> None:
    cosines = Known(unlucky=-0.3)
    sends = Sends(Teachers(cosines))
    sends.rounds(LEAST_MEASURED, "unlucky")
    cosines.agreements["unlucky"] = HONEST
    assert sends.rounds(15, "unlucky") == {"unlucky"}


def test_a_sleeper_is_put_back_with_all_that_the_book_has_of_him() -> None:
    cosines = Known()
    sends = Sends(Teachers(cosines))
    sends.rounds(20, "sleeper", "honest")
    learnt = len(sends.in_book)
    cosines.agreements["sleeper"] = LIAR
    assert sends.rounds(1, "sleeper") == set(), "not one lie enters"
    sends.rounds(6, "sleeper", "honest")
    assert {one.author for one in sends.in_book} == {"honest"}
    assert learnt > len([one for one in sends.in_book if one.author == "honest"]) // 2
    assert not teaches(sends.teachers, "sleeper") and teaches(sends.teachers, "honest")
    assert sends.rounds(60, "sleeper") == set()


def test_one_batch_that_pulls_elsewhere_stays_out_and_its_author_does_not() -> None:
    cosines = Known()
    sends = Sends(Teachers(cosines))
    sends.rounds(20, "noisy")
    cosines.agreements["noisy"] = -0.03
    assert sends.rounds(1, "noisy", each=BATCH_OF_TEACHER) == set()
    assert teaches(sends.teachers, "noisy")
    cosines.agreements["noisy"] = HONEST
    assert sends.rounds(1, "noisy", each=BATCH_OF_TEACHER) == {"noisy"}


def test_where_we_found_nothing_strangers_teach_on_trust_after_a_while_and_little() -> None:
    cosines = Known(honest=HONEST, liar=LIAR)
    sends = Sends(Teachers(cosines), finds=FINDS[:-1])
    assert sends.rounds(PATIENCE, "honest", "liar") == set()
    assert sends.rounds(20, "honest", "liar") == {"honest", "liar"}
    assert len(sends.in_book) == 2 * ON_TRUST
    assert cosines.measured == []
    # There are finds now: everybody is measured, and only who agrees may stay.
    sends.finds = FINDS
    sends.rounds(LEAST_MEASURED, "honest", "liar")
    assert {one.author for one in sends.in_book} == {"honest"}
    # Trust is given once.
    sends.finds = []
    assert sends.rounds(PATIENCE + 5, "liar") == set()


def test_in_tasks_that_we_found_nothing_of_a_teacher_must_only_not_harm_the_others() -> None:
    sends = Sends(Teachers(Known(stranger=0.0, liar=LIAR)))
    assert sends.rounds(10, "stranger", "liar", task="elsewhere") == {"stranger"}
    sends = Sends(Teachers(Known(stranger=0.0)))
    assert sends.rounds(10, "stranger") == set(), "here we know better"


def test_few_authors_are_measured_in_a_round_and_each_has_its_turn() -> None:
    names, cosines = [f"author{number}" for number in range(3 * AUTHORS_A_ROUND)], Known()
    sends = Sends(Teachers(cosines))
    sends.rounds(1, *names)
    assert len(cosines.measured) == AUTHORS_A_ROUND
    sends.rounds(2, *names)
    assert set(cosines.measured) == set(names)


def test_any_number_of_names_costs_no_memory_and_displaces_no_teacher() -> None:
    teachers = Teachers(Known(**{f"liar{number}": LIAR for number in range(2 * MAX_AUTHORS)}))
    sends = Sends(teachers)
    sends.rounds(LEAST_MEASURED, "honest")
    for number in range(2 * MAX_AUTHORS):
        sends.rounds(1, f"liar{number}", each=1)
    assert teaches(teachers, "honest")
    assert teachers.teaching + teachers.waiting == MAX_AUTHORS
    sends.rounds(1, "liar0", each=5 * MAX_HELD)
    assert max(len(one.held) for one in teachers.saved()) == MAX_HELD


def test_who_sends_good_answers_last_cannot_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[Entry]()

    def compare(finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[Comparison | None]:
        looked.extend(lists[0])
        return [Comparison(HONEST, 0.0)]

    sends = Sends(Teachers(compare))
    sends.rounds(1, "author", each=10 * BATCH)
    assert min(one.index for one in looked) < 1000 + 5 * BATCH <= max(one.index for one in looked)
    few = 10 * entry(2000, "author").saved_bytes
    monkeypatch.setattr("swarmnode.training.rules.teachers.MAX_HELD_BYTES", few)
    sends.rounds(1, "other")
    assert sum(len(one.held) for one in sends.teachers.saved()) <= 10


def standing(teachers: Teachers, author: str) -> SavedAuthor:
    return next(one for one in teachers.saved() if one.author == author)


def test_an_answer_that_is_sent_again_is_no_new_one() -> None:
    """Or a liar would be measured over and over for the price of one batch."""
    cosines = Known(liar=LIAR)
    teachers = Teachers(cosines)
    same = [entry(number, "liar") for number in range(BATCH)]
    for number in range(5):
        teachers.rule_on(same, FINDS, random.Random(number))
    assert cosines.measured == ["liar"]
    assert len(standing(teachers, "liar").held) == BATCH


def test_the_same_words_to_another_example_are_another_answer() -> None:
    teachers = Teachers(Known(liar=LIAR))
    alike = [msgspec.structs.replace(entry(number, "liar"), token_ids=(7,)) for number in range(BATCH)]
    teachers.rule_on(alike, FINDS, random.Random(0))
    assert len(standing(teachers, "liar").held) == BATCH


def test_who_waits_or_teaches_is_measured_again_only_after_a_batch_of_new_answers() -> None:
    cosines = Known(liar=LIAR)
    sends = Sends(Teachers(cosines))
    sends.rounds(LEAST_MEASURED, "liar")
    sends.rounds(1, "liar", each=BATCH - 1)
    assert len(cosines.measured) == LEAST_MEASURED
    sends.rounds(1, "liar", each=1)
    assert len(cosines.measured) == LEAST_MEASURED + 1
    cosines.measured.clear()
    sends.rounds(PROVEN, "proven")
    sends.rounds(1, "proven", each=BATCH_OF_TEACHER - 1)
    assert len(cosines.measured) == PROVEN
    sends.rounds(1, "proven", each=1)
    assert len(cosines.measured) == PROVEN + 1


MANY_FINDS = [entry(number, task=f"task {number}") for number in range(100)]


def test_one_measurement_counts_for_no_more_than_an_author_lacks() -> None:
    sends = Sends(Teachers(Known(new=LIAR)), MANY_FINDS)
    sends.rounds(1, "at_once", each=MAX_HELD)
    assert standing(sends.teachers, "at_once").measured == LEAST_MEASURED
    sends.rounds(1, "at_once", each=MAX_HELD)
    assert standing(sends.teachers, "at_once").measured == LEAST_MEASURED + 1
    sends.rounds(1, "new", each=LEAST_ANSWERS)
    assert standing(sends.teachers, "new").measured == 1
    sends.rounds(1, "new", each=MAX_HELD)
    assert standing(sends.teachers, "new").measured == LEAST_MEASURED


def test_a_measurement_is_of_as_many_answers_as_it_counts_for_and_of_a_bounded_number_of_finds() -> None:
    sizes = list[tuple[int, int]]()

    def compare(finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[Comparison | None]:
        sizes.append((len(finds), len(lists[0])))
        return [Comparison(LIAR, 0.0)]

    sends = Sends(Teachers(compare), MANY_FINDS)
    sends.rounds(2, "author", each=MAX_HELD)
    assert sizes == [(FINDS_IN_ALL, LEAST_MEASURED * ANSWERS), (FINDS_IN_ALL, ANSWERS)]


def test_of_more_finds_than_are_compared_with_each_has_its_turn() -> None:
    seen = set[str]()

    def compare(finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[Comparison | None]:
        seen.update(one.task for one in finds)
        return [Comparison(LIAR, 0.0)]

    Sends(Teachers(compare), MANY_FINDS).rounds(12, "author")
    assert len(seen) == len(MANY_FINDS)


def test_who_also_answers_what_we_found_something_in_has_no_unknown_ground() -> None:
    sends = Sends(Teachers(Known(mixed=0.0)))
    sends.rounds(1, "mixed")
    assert sends.rounds(10, "mixed", task="elsewhere") == set()


def test_what_we_found_in_a_task_counts_even_if_the_lot_left_it_out() -> None:
    sends = Sends(Teachers(Known(stranger=0.0)), MANY_FINDS)
    assert sends.rounds(10, "stranger", task="task 0") == set()


def test_doubt_is_whole_at_first_and_never_less_than_none() -> None:
    nearly_all, too_little = THRESHOLD + 0.9 * DOUBT, THRESHOLD - DOUBT / 6
    sends = Sends(Teachers(Known("much", "little", much=nearly_all, little=too_little)))
    assert sends.rounds(LEAST_MEASURED, "much", "little") == set()
    assert sends.rounds(1, "much", "little") == {"much"}
    assert sends.rounds(3 * PROVEN, "little") == set()


def test_those_are_doubted_who_were_measured_enough_and_still_wait() -> None:
    teachers = Teachers(Known(liar=LIAR))
    sends = Sends(teachers)
    sends.rounds(LEAST_MEASURED - 1, "liar", "honest")
    assert teachers.doubted == ()
    sends.rounds(1, "liar", "honest", "new")
    assert teachers.doubted == ("liar",)


def test_whose_last_measurement_is_longest_ago_comes_first() -> None:
    names, cosines = [f"author{number}" for number in range(3 * AUTHORS_A_ROUND)], Known()
    Sends(Teachers(cosines)).rounds(6, *names)
    assert {cosines.measured.count(name) for name in names} == {2}


def test_an_author_of_whom_nothing_is_known_hides_no_other_and_was_not_measured() -> None:
    def compare(finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[Comparison | None]:
        return [None if one[0].author == "empty" else Comparison(HONEST, 0.0) for one in lists]

    sends = Sends(Teachers(compare))
    assert sends.rounds(LEAST_MEASURED, "empty", "honest") == {"honest"}
    assert standing(sends.teachers, "empty").measured == 0


def test_without_a_single_find_strangers_teach_at_once_and_count_as_teachers() -> None:
    sends = Sends(Teachers(Known()), finds=[])
    assert sends.rounds(1, "stranger") == {"stranger"}
    assert (sends.teachers.teaching, sends.teachers.waiting) == (1, 0)


def test_who_taught_on_trust_stays_until_enough_is_known_and_then_teaches_or_not() -> None:
    sends = Sends(Teachers(Known(honest=HONEST, liar=LIAR)), finds=[])
    sends.rounds(1, "honest", "liar")
    sends.finds = FINDS
    sends.rounds(LEAST_MEASURED - 1, "honest", "liar")
    assert {one.author for one in sends.in_book} == {"honest", "liar"}
    sends.rounds(1, "honest", "liar")
    assert {one.author for one in sends.in_book} == {"honest"}
    assert (sends.teachers.teaching, teaches(sends.teachers, "liar")) == (1, False)


def test_what_trust_left_over_is_measured_as_soon_as_there_are_finds() -> None:
    cosines = Known()
    sends = Sends(Teachers(cosines), finds=[])
    sends.rounds(1, "stranger", each=ON_TRUST + LEAST_ANSWERS)
    sends.finds = FINDS
    sends.rounds(1)
    assert cosines.measured == ["stranger"]


def test_where_finds_are_lost_teachers_teach_on_and_who_was_measured_in_vain_hides_nobody() -> None:
    cosines = Known(liar=LIAR)
    sends = Sends(Teachers(cosines))
    sends.rounds(PROVEN, "liar", "honest")
    sends.finds = []
    assert sends.rounds(2, "liar", "honest", "stranger", each=2 * ON_TRUST) == {"honest", "stranger"}
    assert len([one for one in sends.in_book if one.author == "honest"]) == PROVEN * BATCH + 4 * ON_TRUST
    # What has entered is not new any more.
    cosines.measured.clear()
    sends.finds = FINDS
    sends.rounds(1, "honest", each=LEAST_ANSWERS)
    assert "honest" not in cosines.measured


def test_nobody_is_sent_away_of_whom_nothing_was_learnt() -> None:
    teachers = Teachers(Known(liar=LIAR))
    for number in range(2 * LEAST_MEASURED):
        given = [entry(BATCH * number + place, "liar") for place in range(BATCH)]
        assert teachers.rule_on(given, FINDS, random.Random(number)).leave == frozenset()


def test_a_teacher_needs_less_to_go_on_than_it_needed_to_begin() -> None:
    """Noise would send the honest away."""
    cosines = Known(barely=THRESHOLD + 0.01)
    sends = Sends(Teachers(cosines))
    sends.rounds(PROVEN, "barely")
    cosines.agreements["barely"] = THRESHOLD / 2
    assert sends.rounds(1, "barely", each=BATCH_OF_TEACHER) == {"barely"}
    cosines.agreements["barely"] = -0.03
    assert sends.rounds(1, "barely", each=BATCH_OF_TEACHER) == set()
    assert teaches(sends.teachers, "barely")


def test_on_unknown_ground_a_teacher_may_be_a_little_below_zero_until_we_find_something_there() -> None:
    cosines = Known(stranger=UNKNOWN_GROUND / 2)
    sends = Sends(Teachers(cosines))
    sends.rounds(PROVEN, "stranger", task="elsewhere")
    assert sends.rounds(1, "stranger", each=BATCH_OF_TEACHER, task="elsewhere") == {"stranger"}
    cosines.agreements["stranger"] = 1.25 * UNKNOWN_GROUND
    assert sends.rounds(1, "stranger", each=BATCH_OF_TEACHER, task="elsewhere") == set()
    assert teaches(sends.teachers, "stranger"), "one batch is not the author"
    sends.finds = [*FINDS, entry(500, task="elsewhere")]
    cosines.agreements["stranger"] = 0.0
    assert sends.rounds(1, "stranger", each=BATCH_OF_TEACHER, task="elsewhere") == set()
    assert not teaches(sends.teachers, "stranger")


def test_who_fell_has_to_recover_over_as_many_measurements_as_the_fall_counts() -> None:
    cosines = Known()
    sends = Sends(Teachers(cosines), finds=[])
    sends.rounds(1, "sleeper")
    sends.finds = FINDS
    sends.rounds(20, "sleeper")
    cosines.agreements["sleeper"] = -0.3
    sends.rounds(1, "sleeper", each=BATCH_OF_TEACHER)
    assert not teaches(sends.teachers, "sleeper"), "not on the trust of before either"
    cosines.agreements["sleeper"] = HONEST
    assert sends.rounds(5, "sleeper") == set()
    assert sends.rounds(20, "sleeper") == {"sleeper"}


def test_who_agreed_only_lately_waits_until_its_mean_is_enough_and_begins_with_no_more_than_that() -> None:
    cosines = Known(late=LIAR)
    sends = Sends(Teachers(cosines))
    sends.rounds(LEAST_MEASURED, "late")
    cosines.agreements["late"] = 3 * HONEST
    assert sends.rounds(1, "late") == set()
    assert sends.rounds(1, "late") == {"late"}
    one = standing(sends.teachers, "late")
    assert one.recent == one.mean


@pytest.mark.parametrize("long", [1, 20])
def test_who_takes_most_of_the_memory_loses_its_oldest_and_others_nothing(
    monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """`long`: how many times as long as those of others the few answers of the greedy are."""
    few = [entry(number, "modest") for number in range(4)]
    many = [
        msgspec.structs.replace(entry(100 + number, "greedy"), prompt="x" * 100 * long)
        for number in range(6 if long == 1 else 3)
    ]
    room = sum(one.saved_bytes for one in (*few, *many[1:]))
    monkeypatch.setattr("swarmnode.training.rules.teachers.MAX_HELD_BYTES", room)
    teachers = Teachers(Known())
    teachers.take_back([*many, *few])
    assert standing(teachers, "modest").held == tuple(few)
    assert standing(teachers, "greedy").held == tuple(many[1:])


def test_what_is_forgotten_takes_no_memory_and_is_no_new_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cosines = Known(liar=LIAR)
    sends = Sends(Teachers(cosines))
    sends.rounds(LEAST_MEASURED, "liar", task="gone")
    sends.rounds(1, "liar", each=BATCH - 1, task="gone")
    sends.teachers.forget(lambda one: one.task != "gone")
    assert standing(sends.teachers, "liar").held == ()
    sends.rounds(1, "liar", each=LEAST_ANSWERS)
    assert len(cosines.measured) == LEAST_MEASURED
    assert len(standing(sends.teachers, "liar").held) == LEAST_ANSWERS
    room = 10 * entry(2000, "other").saved_bytes
    teachers = Teachers(cosines)
    teachers.take_back([entry(number, "some", task="gone") for number in range(4)])
    teachers.forget(lambda one: one.task != "gone")
    monkeypatch.setattr("swarmnode.training.rules.teachers.MAX_HELD_BYTES", room)
    teachers.take_back([entry(2000 + number, "other") for number in range(9)])
    assert len(standing(teachers, "other").held) == 9


def test_a_restart_keeps_what_waits_and_who_was_trusted() -> None:
    sends = Sends(Teachers(Known()), finds=[])
    sends.rounds(1, "stranger", each=ON_TRUST + 5)
    again = Teachers(Known())
    again.restore(sends.teachers.saved())
    assert again.saved() == sends.teachers.saved()
    assert len(standing(again, "stranger").held) == 5 and teaches(again, "stranger")


def test_answers_that_a_restart_drops_are_no_new_ones_after_it() -> None:
    cosines = Known(liar=LIAR)
    before = Sends(Teachers(cosines))
    before.rounds(LEAST_MEASURED, "liar", task="gone")
    before.rounds(1, "liar", each=BATCH - 1, task="gone")
    again = Teachers(cosines)
    again.restore(before.teachers.saved(), {"sum": "1"})
    Sends(again).rounds(1, "liar", each=LEAST_ANSWERS)
    assert len(cosines.measured) == LEAST_MEASURED


def test_of_too_many_names_the_one_heard_longest_ago_is_dropped() -> None:
    teachers = Teachers(Known())
    teachers.take_back([entry(number, f"author{number}") for number in range(MAX_AUTHORS)])
    teachers.take_back([entry(1000, "author0"), entry(1001, "new")])
    names = [one.author for one in teachers.saved()]
    assert len(names) == MAX_AUTHORS
    assert "author1" not in names and names[-2:] == ["author0", "new"]


def rule(cosines: Known) -> BookRule:
    one = BookRule(SharingRule(), seed=0)
    one.measure_by(cosines)
    return one


def learn(one: BookRule, rounds: range, *authors: str) -> None:
    """Each round brings finds of ours and answers of each author, to examples of their own."""
    for number in rounds:
        places = range(BATCH * number, BATCH * (number + 1))
        ours = [own(([9, 10 + place], 1.0), ([2], 0.0), index=place) for place in places]
        theirs = [
            foreign(
                ([100 + name, 10 + place], 1.0), ([2], 0.0), index=10_000 * (1 + name) + place, author=author
            )
            for name, author in enumerate(authors)
            for place in places
        ]
        one.lessons(ours, theirs, version=number)


def authors_in(one: BookRule) -> set[str]:
    return {entry.author for entry in one.book.entries if not entry.own}


def test_the_book_has_answers_of_teachers_only_and_a_restart_keeps_who_they_are() -> None:
    cosines = Known(liar=LIAR)
    one = rule(cosines)
    learn(one, range(10), "honest", "liar")
    assert authors_in(one) == {"honest"}
    told = one.lessons([], [], version=10)
    assert (told.report.teaching, told.report.waiting) == (1, 1)

    again = rule(cosines)
    again.restore(one.state(), {"sum": "1"})
    assert again.teachers is not None and one.teachers is not None
    assert again.teachers.saved() == one.teachers.saved()
    cosines.measured.clear()
    learn(again, range(10, 11), "honest", "liar")
    assert authors_in(again) == {"honest"}

    elsewhere = rule(cosines)
    elsewhere.restore(one.state(), {"sum": "2"})
    assert elsewhere.teachers is not None
    assert not any(saved.held for saved in elsewhere.teachers.saved())
    assert teaches(elsewhere.teachers, "honest")


def test_restarts_do_not_measure_who_waits_again_and_again() -> None:
    """Chance brings anybody above a threshold who is measured often enough."""
    cosines = Known(liar=LIAR)
    teachers = Teachers(cosines)
    Sends(teachers).rounds(LEAST_MEASURED, "liar", each=BATCH)
    for _ in range(5):
        cosines.measured.clear()
        before, teachers = teachers, Teachers(cosines)
        teachers.restore(before.saved())
        Sends(teachers).rounds(1)
        assert cosines.measured == []


def test_the_answers_of_who_falls_leave_the_book() -> None:
    cosines = Known()
    one = rule(cosines)
    learn(one, range(6), "sleeper", "honest")
    assert authors_in(one) == {"sleeper", "honest"}
    cosines.agreements["sleeper"] = LIAR
    learn(one, range(6, 12), "sleeper", "honest")
    assert authors_in(one) == {"honest"}


def test_a_rule_that_measures_nobody_learns_from_everybody_at_once() -> None:
    one = BookRule(SharingRule(), seed=0)
    learn(one, range(1), "anybody")
    assert authors_in(one) == {"anybody"}
    again = rule(Known())
    again.restore(one.state())
    assert authors_in(again) == {"anybody"}, "a book of before authors were measured"
