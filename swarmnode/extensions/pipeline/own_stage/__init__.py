"""The stage that this member holds: taken under a plan, brought up to date, handed on to others."""
