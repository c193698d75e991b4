"""The schedule of requests: partial rollouts above any engine. No torch, no engine's name."""
