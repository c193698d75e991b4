"""Learning: scored rollout groups become a new policy version."""
