"""A model of a script becomes a folder once, whoever else writes the same one."""

import shutil
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmnode.model.model_folder import folder_of_model


def test_two_processes_may_write_the_same_model_at_the_same_time(quick_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quick_model)
    tokenizer = AutoTokenizer.from_pretrained(quick_model)
    alone = folder_of_model(model, tokenizer, tmp_path / "alone")
    shared = tmp_path / "shared"
    of_the_other = shared / f".{alone.name}.1"
    of_the_other.mkdir(parents=True)
    save = tokenizer.save_pretrained

    def save_last(folder: Path) -> None:
        save(folder)
        # The other one is faster.
        shutil.copytree(alone, shared / alone.name)

    tokenizer.save_pretrained = save_last
    assert folder_of_model(model, tokenizer, shared) == shared / alone.name
    assert of_the_other.exists()
    assert sorted(one.name for one in shared.iterdir()) == [of_the_other.name, alone.name]
