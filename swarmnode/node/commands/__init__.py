"""Commands that run no training node of their own."""
