"""Passes over memory that torch has no single operation for, in C: what a CPU node spends its time on once
the matrix products are fast.

kernels/*.h -> compiler.py (with the machine's own C compiler, once) -> passes.py, decode_kernels.py
    -> native_record.py -> cpu_kernels.py -> model/, rollout/decode/

Nothing depends on it: without a compiler, on a GPU and in other types the callers' torch operations run.
"""

from swarmnode.registry import Parts

PARTS: Parts = {
    "kernels": {"native": "swarmnode.extensions.native.native_record:NATIVE"},
    "check": {"compiler": "swarmnode.extensions.native.native_check:compiler_findings"},
}
