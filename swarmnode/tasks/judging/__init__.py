"""Judging answers: rewards, votes, and the processes that run code of others."""
