"""Prompts on their way into an engine's rows: computed once for all that share them, or continued."""
