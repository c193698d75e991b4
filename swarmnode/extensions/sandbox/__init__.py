"""Programs of others, run with no way out: what a policy writes as code is executed here and nowhere else."""
