"""Peers that cannot hold a model train it together: stages of layers, paths that skip, links measured."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {"pipeline": "swarmnode.extensions.pipeline.pipeline_commands:app"},
    "run": {"pipeline": "swarmnode.extensions.pipeline.runtime.run_pipeline:run_pipeline"},
}
