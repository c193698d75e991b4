"""`join` takes addresses and invitations alike."""

import pytest

from swarmnode.cli.settings import invited
from swarmnode.errors import ConfigError, NetworkError
from swarmnode.network.finding.invitation import Invitation

SEED = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
INVITATION = Invitation(name="friends", seeds=(SEED,)).text()


def test_an_invitation_names_the_swarm_and_whom_to_dial() -> None:
    assert invited(None, None, [INVITATION]) == ("friends", [SEED])
    assert invited(None, "commons", [SEED]) == ("commons", [SEED])
    assert invited(None, None, None) == (None, None)


def test_an_invitation_to_another_swarm_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(NetworkError, match="to friends, not to commons"):
        invited(None, "commons", [INVITATION])


@pytest.mark.parametrize("task", ["last.py", "/tmp/mine/last.py", "rows.jsonl?reward=numeric_match"])
def test_a_task_in_the_place_of_an_address_is_told(task: str) -> None:
    with pytest.raises(ConfigError) as caught:
        invited(None, None, [task])
    assert caught.value.hint == f"did you mean --task {task}?"
