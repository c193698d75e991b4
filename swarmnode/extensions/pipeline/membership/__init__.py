"""Membership of a pipeline and agreement on its plan, without a coordinator."""
