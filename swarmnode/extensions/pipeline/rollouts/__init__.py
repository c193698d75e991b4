"""Rollouts through the stages: caches of keys and values, and an engine that drives the stages."""
