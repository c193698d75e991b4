"""Model families: one architecture each, as differences from Llama, read by engine and training alike."""
