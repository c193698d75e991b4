"""Rollouts that a member makes while its stage has nothing to do."""
