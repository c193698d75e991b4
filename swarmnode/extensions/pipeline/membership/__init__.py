"""Who is a member, and which plan all members agree on, without a coordinator."""
