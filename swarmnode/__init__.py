"""swarmnode: a member of a decentralized reinforcement-learning swarm for language models.

Read the folders in the order identity, network, tasks, rollout, exchange, training, node, cli and you have
read the life of a rollout.
"""

__version__ = "0.1.0"
