"""The page of a running node: one server for people, commands and Prometheus."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "page": {"web": "swarmnode.extensions.page.page_server:PageServer"},
    "rollouts": {"file": "swarmnode.extensions.page.rollout_log:RolloutLog"},
}
