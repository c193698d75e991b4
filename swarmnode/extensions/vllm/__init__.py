"""vLLM behind our Protocol. Nothing outside this folder imports vLLM."""
