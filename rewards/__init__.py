"""Plain reward functions on TRL's contract: prompts, completions, columns in; a float or None each out."""
