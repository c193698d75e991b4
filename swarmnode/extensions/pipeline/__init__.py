"""Peers that cannot hold a model alone train it together: layers in stages, paths that may skip stages."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {"pipeline": "swarmnode.extensions.pipeline.pipeline_commands:app"},
    "run": {"pipeline": "swarmnode.extensions.pipeline.runtime.run_pipeline:run_pipeline"},
}
