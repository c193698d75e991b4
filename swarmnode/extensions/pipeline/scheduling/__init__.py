"""Paths of one iteration for given nodes, links and stages: searched, simulated, checked."""
