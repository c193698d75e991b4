"""Fixtures shared by the whole suite."""

import os

# Before torch is imported anywhere: more threads than one are far slower beside another busy process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
