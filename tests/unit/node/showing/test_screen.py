"""The log of a program goes on as before when a node has ended, whichever of several ends first."""

import logging

from swarmnode.node.showing.screen import Screen


def test_our_logger_is_as_it_was_once_the_last_of_several_nodes_has_ended() -> None:
    ours = logging.getLogger("swarmnode")
    assert ours.propagate
    first = Screen(terminal=False)
    first.__enter__()
    second, quiet = Screen(terminal=False), Screen(terminal=False, shows=False)
    second.__enter__()
    quiet.__enter__()
    quiet.__exit__()
    assert not ours.propagate, "two show the story themselves"
    first.__exit__()
    assert not ours.propagate, "one still does"
    second.__exit__()
    assert ours.propagate
