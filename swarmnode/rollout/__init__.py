"""Questions in, sampled answers with their true log-probabilities out."""
