"""Planning: the costs of an iteration, the stage of each member, and the path of each micro-batch."""
