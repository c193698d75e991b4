"""Averaging among the replicas of a stage, copies of states at other members, and checkpoints."""
