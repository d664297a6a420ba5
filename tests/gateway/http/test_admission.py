"""`retry-after` is computed from the rate at which requests end."""

from types import SimpleNamespace

import pytest

from gateway.http import body
from gateway.http.body import Admission


@pytest.mark.parametrize(
    ("num_ended", "wait_s"), [(0, 1), (1, 30), (20, 20), (40, 10), (100, 4), (400, 1)]
)
def test_retry_after_is_the_expected_time_until_open_requests_have_ended(
    monkeypatch, num_ended, wait_s
):
    """Forty requests are open. Requests that ended more than ten seconds ago do not count."""
    now = 1000.0
    monkeypatch.setattr(body, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(body.random, "uniform", lambda low, high: (low + high) / 2)
    gate = Admission(max_open=1000, max_body_bytes=1)
    for _ in range(40):
        gate.__enter__()
    for _ in range(300):
        with gate:
            pass
    now += 11.0
    for _ in range(num_ended):
        with gate:
            pass
    assert gate.retry_after_s() == wait_s
