"""One life of the node that soak.py disturbs: its clock can be set, and it calls itself another version.

soak.py -> tests/joined_node.py -> [soak_life.py CLOCK VERSION ... join ...] -> swarmnode join

The clock runs ahead by as many seconds as the file CLOCK has bytes. No privilege is needed for that, and no
other program's clock changes.
"""

import os
import runpy
import sys
import time

import swarmnode


def main() -> None:
    clock, swarmnode.__version__, *rest = sys.argv[1:]
    true_time = time.time

    def shifted() -> float:
        return true_time() + os.stat(clock).st_size

    time.time = shifted
    sys.argv = ["swarmnode", *rest[rest.index("join") :]]
    runpy.run_module("swarmnode", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
