"""States of stages: held, copied, fetched from other members, and written as checkpoints."""
