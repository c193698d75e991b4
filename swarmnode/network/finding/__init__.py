"""Finding peers: seeds, invitations, mDNS, and peers that were met before."""
