"""An engine for every causal LM of transformers: the model's own forward, one batch at a time."""

from swarmnode.registry import Parts

PARTS: Parts = {"engine": {"generate": "swarmnode.extensions.generate.generate_record:GENERATE"}}
