"""Which requests run when: partial rollouts above any engine. No torch, no engine's name."""
