"""The cases that need bitsandbytes, in a process that has it.

peft imports bitsandbytes wherever it finds it, which takes seconds: so it lies beside the environment (the
Makefile puts it there), and elsewhere these cases are skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BESIDE = Path(sys.prefix) / "nf4"
FILES = (
    "tests/unit/model/adapters/test_nf4.py",
    "tests/unit/model/test_base_model.py",
    "tests/unit/extensions/generate/test_generate_engine_nf4.py",
)


@pytest.mark.slow
@pytest.mark.skipif(not BESIDE.is_dir(), reason="bitsandbytes is not installed beside this environment")
def test_a_base_in_four_bits_is_loaded_sampled_and_trained() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(BESIDE)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout and "s" not in done.stdout.split("[")[0], "bitsandbytes was not found"
