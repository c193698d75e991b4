"""Finds, simulates and checks the paths of one iteration for given nodes, links and stages."""
