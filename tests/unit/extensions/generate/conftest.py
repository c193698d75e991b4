"""The small model, the requests and the driver of the other engines' tests."""

from tests.unit.rollout.conftest import ask, run, tiny

__all__ = ["ask", "run", "tiny"]
