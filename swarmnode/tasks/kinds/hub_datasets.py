"""A data set of the Hugging Face hub, or of its cache on this disk if the hub does not answer.

hf:owner/name[/subset][:split] -> [load_from_hub] -> tables.py

Only data is loaded: `datasets` 4 and later run no scripts of a repository. If the hub does not answer, this
is noticed within seconds; `datasets` alone would try for minutes.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swarmnode.errors import TaskError
from swarmnode.machine.installing import how_to_install
from swarmnode.tasks.hub_access import trouble_with_hub
from swarmnode.tasks.optional_packages import extra_module

MAX_DOWNLOAD_BYTES = 8 << 30

_NAME = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)(/(?P<subset>[\w.-]+))?(:(?P<split>[\w.\[\]:%+-]+))?")


def load_from_hub(name: str) -> Iterator[Mapping[str, Any]]:
    """Returns the rows of `owner/name[/subset][:split]`; without a split, those of train. Raises
    TaskError."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise TaskError(
            f"hf:{name} is not a data set name", hint="write hf:owner/name or hf:owner/name:split"
        )
    repo, subset, split = found["repo"], found["subset"], found["split"] or "train"
    datasets = extra_module("datasets", how_to_install("data"), f"hf:{repo}")
    trouble = trouble_with_hub(repo, "README.md", repo_type="dataset")
    datasets.disable_progress_bars()
    try:
        with _offline(datasets, trouble is not None):
            builder = datasets.load_dataset_builder(repo, subset)
            size = builder.info.download_size or 0
            if size > MAX_DOWNLOAD_BYTES:
                raise TaskError(
                    f"{repo} is {size / 2**30:.0f} GiB to download; the limit is {MAX_DOWNLOAD_BYTES >> 30}",
                    hint="save a part of it, and pass that file or folder",
                )
            builder.download_and_prepare()
            return iter(builder.as_dataset(split=split))
    except (OSError, ValueError, KeyError) as error:
        if trouble is not None:
            raise TaskError(
                f"{repo} is not on this disk, and the hub cannot be reached: {trouble}",
                hint="check the name and the connection, or use a file: --task questions.jsonl",
            ) from error
        raise TaskError(
            f"hf:{name} cannot be loaded: {error}", hint="write hf:owner/name/subset:split, as on its page"
        ) from error


@contextmanager
def _offline(datasets: Any, offline: bool) -> Generator[None]:
    """Limits both libraries to this disk for the `with` block, as HF_HUB_OFFLINE does."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = (offline or one for one in before)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
