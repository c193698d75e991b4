"""The stage that this member holds: assigned by a plan, brought up to date, and passed on to others."""
