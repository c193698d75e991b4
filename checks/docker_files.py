"""The files of docker/ that are no images: compose.yml and the unit.

docker_check.py -> [docker_files] -> notes for report.py
"""

import re
import subprocess
import venv
from pathlib import Path

from images import have
from steps import require, run

REPOSITORY = Path(__file__).resolve().parent.parent
INDEX_TIMEOUT_S = 600


def new_python(folder: Path) -> Path:
    """The pip of a clean environment, with this machine's settings."""
    venv.create(folder, with_pip=True)
    run([folder / "bin/pip", "install", "-q", "--upgrade", "pip"], INDEX_TIMEOUT_S)
    return folder / "bin/pip"


def check_compose(work: Path) -> str:
    pip = new_python(work / "schema")
    run([pip, "install", "-q", "check-jsonschema"], INDEX_TIMEOUT_S)
    command = [pip.with_name("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    run([*command, REPOSITORY / "docker/compose.yml"])
    wrong = work / "wrong.yml"
    wrong.write_text((REPOSITORY / "docker/compose.yml").read_text().replace("volumes:", "volume:"))
    refused = subprocess.run([str(part) for part in (*command, wrong)], capture_output=True, check=False)
    require(refused.returncode != 0, "the schema accepts a key that does not exist: it checks nothing")
    return "check-jsonschema, which also refuses a mistyped key"


def check_unit(work: Path) -> str:
    require(have("systemd-analyze"), "there is no systemd-analyze on this machine")
    text = (REPOSITORY / "docker/swarmnode.service").read_text()
    # It insists that the command exists; everything else is checked as it stands.
    program = work / "swarmnode"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = work / "swarmnode.service"
    unit.write_text(text.replace("/opt/swarmnode/bin/swarmnode join", f"{program} join"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    require(done.returncode == 0 and not done.stderr.strip(), done.stderr or "refused without a word")
    score = run(["systemd-analyze", "security", "--offline=true", "--no-pager", unit]).splitlines()[-1]
    return re.sub(r"[^\x20-\x7e]", "", score).strip(" >")
