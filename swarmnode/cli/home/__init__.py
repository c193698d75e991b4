"""Commands about what a home keeps: identity, runs, right answers, and a way out for adapters."""
