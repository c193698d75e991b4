"""SAPO: tell the swarm which answers we found, train on answers that others found.

messages codec            what travels, and how it is packed
gossip bodies             the two planes: signed headers by gossip, bodies by request
validation wide judge     from untrusted bytes to a group that was scored on this machine
neighbourhood             the short way between the policies of one process
pool selection buffer     which headers to fetch, which groups to hand to the trainer
reputation ledger         who may speak, and what became of everything
exchange                  all of it as one object
"""
