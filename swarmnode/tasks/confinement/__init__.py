"""What a confined program runs in: namespaces, landlock, seccomp and limits, set up from within.

sandbox.py (the task's process) -> [confinement] -> the program

These files are imported by an interpreter of their own, as a package without swarmnode around it: they use
the standard library alone, and each other by relative imports. launch.py is where that interpreter begins.
"""
