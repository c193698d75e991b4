"""Peers that cannot hold a model train it together: stages of layers, paths that skip, links measured."""
