"""Who is a member, and which plan holds: agreed on without a coordinator."""
