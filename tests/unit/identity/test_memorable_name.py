import pytest

from swarmnode.identity.memorable_name import ANIMALS, LOOKS, MOODS, memorable_name
from swarmnode.identity.node_key import NodeKey


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (0, "prudent-tawny-cobra"),
        (1, "gentle-opal-newt"),
        (2, "agile-cobalt-bison"),
        (255, "hopeful-ivory-llama"),
    ],
)
def test_a_name_never_changes(seed: int, name: str):
    assert NodeKey(bytes([seed]) * 32).name == name


def test_there_are_sixty_four_cubed_names_without_doubles():
    for words in (MOODS, LOOKS, ANIMALS):
        assert len(words) == len(set(words)) == 64
        assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert not set(MOODS) & set(LOOKS)


def test_names_are_spread_over_all_words():
    names = [memorable_name(f"peer {number}").split("-") for number in range(4000)]
    for position in range(3):
        assert len({name[position] for name in names}) == 64
