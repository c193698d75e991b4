"""From scored rollout groups to a new policy version."""
