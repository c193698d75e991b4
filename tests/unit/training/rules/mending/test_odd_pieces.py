"""A piece that one author repeats and the median of the others does not write is odd."""

from swarmnode.training.rules.mending.odd_pieces import FEWEST_ANSWERS, MOST_ANSWERS, MOST_AUTHORS, OddPieces


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def swarm(**texts: str) -> OddPieces:
    """Each author has written its text before an answer that changes."""
    pieces = OddPieces()
    for author, text in texts.items():
        for number in range(FEWEST_ANSWERS):
            pieces.add("rev", author, ids(f"{text}{number:03}"))
    return pieces


def odd_part(pieces: OddPieces, author: str, text: str) -> str:
    return "".join(text[place] for place in sorted(pieces.odd_places("rev", author, ids(text))))


def test_what_one_author_puts_into_every_answer_is_odd_and_the_answer_is_not() -> None:
    pieces = swarm(a="", b="", c="", spammer="BUY!")
    assert odd_part(pieces, "spammer", "BUY!999") == "BUY!"
    assert odd_part(pieces, "a", "999") == ""


def test_a_minority_of_friends_does_not_make_it_usual() -> None:
    pieces = swarm(a="", b="", c="", d="", spammer="BUY!", friend="BUY!", other_friend="BUY!")
    assert odd_part(pieces, "spammer", "BUY!999") == "BUY!"


def test_what_most_authors_write_is_not_odd() -> None:
    pieces = swarm(a="so ", b="so ", c="so ", d="so ")
    assert odd_part(pieces, "a", "so 999") == ""


def test_nothing_is_odd_before_enough_is_known() -> None:
    assert odd_part(swarm(a="", b="", spammer="BUY!"), "spammer", "BUY!999") == ""
    pieces = swarm(a="", b="", c="")
    pieces.add("rev", "spammer", ids("BUY!000"))
    assert odd_part(pieces, "spammer", "BUY!000") == ""
    assert swarm(a="", b="", c="", spammer="BUY!").odd_places("gcd", "spammer", ids("BUY!")) == frozenset()


def test_habits_are_those_of_the_newest_answers_and_of_the_authors_heard_last() -> None:
    pieces = swarm(a="", b="", c="", spammer="BUY!")
    for number in range(MOST_ANSWERS):
        pieces.add("rev", "spammer", ids(f"{number:03}"))
    assert odd_part(pieces, "spammer", "BUY!999") == ""
    for number in range(MOST_AUTHORS):
        pieces.add("rev", f"name {number}", ids("abc"))
    assert odd_part(pieces, "spammer", "BUY!999") == ""
