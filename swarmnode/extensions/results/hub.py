"""A run on a hub: pushed with a card of figures, and fetched to go on with it elsewhere.

export --push -> [pusher] -> adapter, tokenizer, README.md, swarmnode/state.json -> [fetch] -> pull_command.py

Whoever pushed is a stranger to whoever fetches: sizes are bounded before anything is read, the adapter is
tensors alone, its state is strictly typed, and of its tasks only those that come with swarmnode are taken on.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from swarmnode.errors import CheckpointError, ConfigError, SwarmnodeError
from swarmnode.extensions.results.exported import Exported
from swarmnode.extensions.results.model_card import base_name, model_card
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.training.records import STATE, State, read_state

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PATIENCE_S = 60.0
"""Longest silence of the hub."""
FOLDER = "swarmnode"
"""Folder of the state in the repository."""
MOST_BYTES = {
    "adapter_config.json": 2**20,
    f"{FOLDER}/{STATE}": 2**20,
    "adapter_model.safetensors": 4 * 2**30,
}
"""Files that a run is fetched by, with their largest sizes."""


class HubError(SwarmnodeError):
    exit_code = 5


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push that is done, and who can see it."""

    url: str
    private: bool


def pusher(repo: str, *, public: bool) -> Callable[[Exported], Pushed]:
    """Returns what pushes an export to the repository. Raises ConfigError while nothing is loaded yet."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push: {error}", hint="write OWNER/NAME") from error
    if "/" not in repo:
        raise ConfigError(f"--push: {repo} is not a repository name", hint="write OWNER/NAME")
    if get_token() is None:
        raise ConfigError("no token for the hub", hint="set HF_TOKEN to a token that may write")
    return partial(_push, repo, public)


def _push(repo: str, public: bool, exported: Exported) -> Pushed:
    """Uploads what was exported, with a card and with what a start elsewhere goes on by. The repository is
    made, private unless `public`, where there is none. Raises HubError, ConfigError."""
    from huggingface_hub import CommitOperationAdd

    additions: list[Any] = [
        CommitOperationAdd(str(path.relative_to(exported.folder)), _without_paths(path, exported))
        for path in sorted(exported.folder.rglob("*"))
        if path.is_file() and path.name != "README.md"
    ]
    additions.append(CommitOperationAdd("README.md", model_card(exported, repo).encode()))
    if not exported.merged:
        state = msgspec.json.encode(for_others(exported.state))
        additions.append(CommitOperationAdd(f"{FOLDER}/{STATE}", state))
    with _asking(repo) as api:
        api.create_repo(repo, private=not public, exist_ok=True)
        private = bool(api.model_info(repo).private)
        if not private and not public:
            raise ConfigError(f"{repo} exists and is public", hint="name another repository, or add --public")
        round = exported.state.counters.round
        done = api.create_commit(repo, additions, commit_message=f"Run {exported.run}, round {round}")
        return Pushed(str(done.repo_url), private)


def fetched(repo: str, folder: Path) -> State:
    """Downloads the adapter and the state of a run into the folder, and returns that state. Raises HubError,
    CheckpointError."""
    with _asking(repo) as api:
        info = api.model_info(repo, files_metadata=True)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        if missing := MOST_BYTES.keys() - sizes.keys():
            merged = "config.json" in sizes
            raise HubError(
                f"{repo} holds no swarmnode run: {min(missing)} is missing",
                hint=f"to use a whole model as a base: swarmnode join --model {repo}"
                if merged
                else "push one with `swarmnode export --push`, without --merged",
            )
        if large := [name for name, most in MOST_BYTES.items() if sizes[name] > most]:
            raise HubError(
                f"{large[0]} of {repo} has {sizes[large[0]]} bytes, the limit is {MOST_BYTES[large[0]]}",
                hint="pull another: no swarmnode run is that large",
            )
        for name in MOST_BYTES:
            api.hf_hub_download(repo, name, revision=info.sha, local_dir=folder)
    state = read_state(folder / FOLDER)
    if not 0 <= state.counters.round < 10**8 or state.policy_version < 0:
        raise CheckpointError(f"{repo} claims to be from round {state.counters.round}")
    return for_others(state)


def for_others(state: State) -> State:
    """Returns a state without what is about one machine: paths of tasks, authors, digests."""
    counters = msgspec.structs.replace(state.counters, external_groups_trained={})
    ours = {task.name for task in BUILTIN_TASKS}
    known = tuple(spec for spec in state.task_specs if spec in ours)
    return msgspec.structs.replace(
        state, base_model=base_name(state.base_model), counters=counters, task_specs=known, digests={}
    )


@contextmanager
def _asking(repo: str) -> "Generator[HfApi]":
    """Yields the hub's client. What goes wrong with it becomes a HubError, without the token in its text."""
    from huggingface_hub import HfApi, get_session, get_token
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    # Its bases: HTTPError of the client that it is built on, and OSError.
    bases = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    trouble = (*bases, EntryNotFoundError, ValueError)
    get_session().timeout = PATIENCE_S
    try:
        yield HfApi()
    except trouble as error:
        told = str(error).replace(get_token() or "\0", "***").strip() or type(error).__name__
        raise HubError(
            f"the hub request for {repo} failed: {told}",
            hint="check the name OWNER/NAME, the connection, and the permissions of HF_TOKEN",
        ) from None


def _without_paths(path: Path, exported: Exported) -> Path | bytes:
    """Returns the content of a file of settings with the base's name instead of its folder on this disk."""
    if path.name not in ("adapter_config.json", "config.json", "tokenizer_config.json"):
        return path
    content: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    for key in ("base_model_name_or_path", "_name_or_path", "name_or_path"):
        if key in content:
            content[key] = base_name(exported.state.base_model)
    return msgspec.json.format(msgspec.json.encode(content), indent=2)
