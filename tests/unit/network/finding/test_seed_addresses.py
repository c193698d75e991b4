"""Seeds come from addresses, files and the DNS, in one list; what names nobody is refused at the start."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from swarmnode.errors import ConfigError, NetworkError
from swarmnode.machine.storage import builtin_folder
from swarmnode.network.finding.seed_addresses import MAX_ADDRESSES_OF_NAME, Seeds, look_up, read_seeds

PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
ONE, OTHER = (f"/ip4/192.0.2.{last}/tcp/4001/p2p/{PEER}" for last in (7, 8))
NOWHERE = Path("/nonexistent/seeds.txt")


def test_addresses_files_and_names_are_one_list(tmp_path: Path):
    file = tmp_path / "friends"
    file.write_text(f"# friends\n\n{OTHER}  # at work\n/dnsaddr/seeds.example.org\n{ONE}\n")
    assert read_seeds([ONE, str(file)], NOWHERE) == Seeds((ONE, OTHER), ("seeds.example.org",))
    assert read_seeds(["shipped"], file) == read_seeds([str(file)], NOWHERE)


def test_the_list_that_is_shipped_can_be_read():
    read_seeds(["shipped"], builtin_folder("configs") / "seeds.txt")


@pytest.mark.parametrize(
    "entry", ["/ip4/192.0.2.7/tcp/4001", "/ip4/300.0.0.1", "/dnsaddr/", "/dnsaddr/a b/c"]
)
def test_an_entry_that_names_nobody_is_refused(entry: str):
    with pytest.raises(NetworkError):
        read_seeds([entry], NOWHERE)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="neither an address nor a readable list"):
        read_seeds(["seeds.txt"], NOWHERE)
    (tmp_path / "large").write_text("#" * 100_000)
    with pytest.raises(ConfigError, match="larger"):
        read_seeds([str(tmp_path / "large")], NOWHERE)


async def test_a_name_stands_for_the_addresses_in_its_records():
    async def resolve(name: str) -> Sequence[bytes]:
        assert name == "_dnsaddr.seeds.example.org"
        junk = [b"v=spf1", b"\xff\xff", b"dnsaddr=/ip4/1.2.3.4"]
        return [f"dnsaddr={ONE}".encode(), *junk, f"dnsaddr={OTHER}".encode()]

    assert await look_up("seeds.example.org", resolve) == (ONE, OTHER)


async def test_a_name_stands_for_no_more_than_some_addresses():
    async def resolve(name: str) -> Sequence[bytes]:
        return [f"dnsaddr=/ip4/192.0.2.7/tcp/{port}/p2p/{PEER}".encode() for port in range(1, 1000)]

    assert len(await look_up("seeds.example.org", resolve)) == MAX_ADDRESSES_OF_NAME
