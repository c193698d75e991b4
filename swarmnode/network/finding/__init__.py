"""Finding peers: seeds, invitations, the local network, and peers that were met before."""
