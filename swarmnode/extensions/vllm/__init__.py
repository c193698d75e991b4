"""vLLM behind our engine protocol. Nothing outside this folder imports vLLM."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "engine": {"vllm": "swarmnode.extensions.vllm.vllm_record:VLLM"},
}
