"""Planning: what an iteration costs, who holds which stage, and which micro-batch goes where."""
