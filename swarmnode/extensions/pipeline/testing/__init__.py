"""Pipelines in one process and emulated links, for tests and benchmarks."""
