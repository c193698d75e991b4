"""Turns the members' announcements into a plan that all agree on, and repairs paths when members are lost."""
