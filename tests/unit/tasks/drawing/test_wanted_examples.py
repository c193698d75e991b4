from itertools import islice

from swarmnode.tasks.drawing.example_stream import ExampleStream
from swarmnode.tasks.drawing.wanted_examples import MAX_WAITING, WantedExamples
from swarmnode.testing import FakeTask
from swarmnode.types import Example, ExampleKey


def stream() -> ExampleStream:
    return ExampleStream([FakeTask()], node_seed=0, per_round=4)


def wanted(count: int) -> list[Example]:
    return [Example(ExampleKey("sum", "1", 77, index), f"{index}+1=") for index in range(count)]


def test_without_wishes_the_stream_is_as_it_was() -> None:
    assert list(islice(WantedExamples(stream()), 20)) == list(islice(stream(), 20))


def test_wanted_examples_are_every_second_one_and_the_stream_goes_on_between_them() -> None:
    examples, plain = WantedExamples(stream()), list(islice(stream(), 6))
    examples.want(wanted(3))
    drawn = list(islice(examples, 8))
    assert [example for example in drawn if example.key.seed == 77] == wanted(3)
    assert [example for example in drawn if example.key.seed != 77] == plain[:5]
    assert [place for place, example in enumerate(drawn) if example.key.seed == 77] == [1, 3, 5]


def test_an_example_is_wanted_once() -> None:
    examples = WantedExamples(stream())
    for _ in range(3):
        examples.want(wanted(2))
    assert sum(example.key.seed == 77 for example in islice(examples, 12)) == 2


def test_wishes_are_bounded() -> None:
    examples = WantedExamples(stream())
    examples.want(wanted(MAX_WAITING + 5))
    drawn = [e.key.index for e in islice(examples, 4 * MAX_WAITING) if e.key.seed == 77]
    assert drawn == list(range(5, MAX_WAITING + 5))


def test_the_place_of_the_stream_does_not_count_wanted_examples() -> None:
    examples, plain = WantedExamples(stream()), stream()
    examples.want(wanted(1))
    list(islice(examples, 3))
    list(islice(plain, 2))
    assert examples.place == plain.place
