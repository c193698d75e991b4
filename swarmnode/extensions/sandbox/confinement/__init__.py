"""The confinement of a program, set up from within: namespaces, landlock, seccomp and limits."""
