"""The swarm's library: right answers that anyone can get later, as their authors signed them.

signed_group.py (one row) -> shelf.py (what this node keeps) -> library_pages.py (asked for and served)
                                   ^                                       |
                                   +--- borrower.py (asks, has judged) <---+
"""
