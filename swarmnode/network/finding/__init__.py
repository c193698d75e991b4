"""Finding peers: seeds, invitations, the local network, and peers that we met before."""
