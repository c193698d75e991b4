"""Trackers that get the numbers of every round."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "monitor": {
        "tensorboard": "swarmnode.extensions.trackers.trackers:TensorBoardMonitor",
        "trackio": "swarmnode.extensions.trackers.trackers:TrackioMonitor",
        "wandb": "swarmnode.extensions.trackers.trackers:WandbMonitor",
    },
}
