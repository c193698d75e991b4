"""SAPO: tell the swarm which answers we found, train on answers that others found.

messages      what travels, and how it is packed
limits        settings, bounds, and the reasons for which something is dropped
planes        signed headers by gossip, bodies by request
announcing    what is published, and the short way between the policies of one process
validation    from untrusted bytes to a group that was scored on this machine
inbox         what came in: headers to fetch, groups for the trainer
selection     which of them, and which hard examples of others we answer, too
fetcher       bodies of the chosen headers, checked, judged, buffered
reputation    who may speak, and what became of everything; record keeps it over restarts
exchange      all of it as one object
"""
