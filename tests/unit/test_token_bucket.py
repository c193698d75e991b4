"""An allowance: a rate on average, a burst at once."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.token_bucket import TokenBucket


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), max_size=60))
def test_a_bucket_never_gives_more_than_burst_and_rate_allow(steps: list[tuple[float, float]]):
    bucket, now, taken = TokenBucket(rate_per_s=2.0, burst=10.0), 0.0, 0.0
    for wait_s, amount in steps:
        now += wait_s
        if bucket.take(amount, now=now):
            taken += amount
    assert taken <= 10.0 + 2.0 * now + 1e-6


def test_a_clock_that_is_set_back_gives_and_takes_nothing():
    bucket = TokenBucket(rate_per_s=1.0, burst=2.0)
    assert bucket.take(2.0, now=100.0)
    assert not bucket.take(now=50.0)
    assert bucket.take(now=51.0)
