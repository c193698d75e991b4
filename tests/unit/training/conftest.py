"""Fixtures of the folder: the random policy that training and model are tested on."""

from tests.random_policy import base, exact_norms, group, nudged, policy, with_and_without_kernels

__all__ = ["base", "exact_norms", "group", "nudged", "policy", "with_and_without_kernels"]
