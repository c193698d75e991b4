"""SAPO: tell the swarm which answers we found, and train on answers that others found.

exchange    all of it as one object; beside it its settings, bounds, messages, and drop reasons
gossip/     signed headers: announced, heard and pooled; asking for help
bodies/     the answers behind headers: which to fetch, from whom, handed on, buffered for the trainer
validation/ from untrusted bytes to a group that was scored on this machine
peers/      allowances, bans, counts of what happened, and the record that survives a restart
library/    right answers for nodes that come later
"""
