"""The memory of peers: allowances, scores, bans, what was seen; and the ledger of what happened."""
