"""Which errors are tried again, and when."""

import pytest

from deltaplane.errors import DeltaplaneError, NotFoundError, ResourceExhaustedError, UnavailableError
from deltaplane.retry import Attempts, RetryPolicy

POLICY = RetryPolicy(max_attempts=3, initial_backoff=0.0, max_backoff=10.0)


def refusal(retry_after: float | None) -> UnavailableError:
    error = UnavailableError("draining")
    error.retry_after = retry_after
    return error


def test_without_a_policy_a_call_is_tried_once() -> None:
    assert Attempts(None, timeout=None, idempotent=True).wait_after(refusal(1.0)) is None


def test_tries_end_with_the_policy() -> None:
    attempts = Attempts(POLICY, timeout=None, idempotent=True)
    waits = [attempts.wait_after(ResourceExhaustedError("full")) for _ in range(3)]
    assert waits == [0.0, 0.0, None]


@pytest.mark.parametrize("error", [NotFoundError("gone"), DeltaplaneError("unknown")])
def test_other_errors_are_final(error: DeltaplaneError) -> None:
    assert Attempts(POLICY, timeout=None, idempotent=True).wait_after(error) is None


def test_what_the_server_asks_for_is_waited_but_no_longer_than_the_bound() -> None:
    attempts = Attempts(POLICY, timeout=None, idempotent=True)
    assert attempts.wait_after(refusal(2.5)) == 2.5
    assert attempts.wait_after(refusal(3600.0)) == 10.0


def test_a_change_is_tried_again_only_when_the_server_refused_it() -> None:
    attempts = Attempts(POLICY, timeout=None, idempotent=False)
    assert attempts.wait_after(refusal(0.5)) == 0.5
    assert attempts.wait_after(refusal(None)) is None


def test_no_wait_passes_the_timeout() -> None:
    attempts = Attempts(POLICY, timeout=1.0, idempotent=True)
    assert attempts.wait_after(refusal(0.1)) == 0.1
    assert attempts.wait_after(refusal(5.0)) is None
    remaining = attempts.remaining()
    assert remaining is not None
    assert remaining <= 1.0


def test_the_backoff_doubles_up_to_its_bound() -> None:
    policy = RetryPolicy(initial_backoff=1.0, max_backoff=4.0)
    for attempt, ceiling in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 4.0)):
        waits = [policy.backoff(attempt, None) for _ in range(200)]
        assert max(waits) <= ceiling
        assert max(waits) > ceiling / 2
        assert min(waits) < ceiling / 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_attempts": 0}, "max_attempts: 0 is below 1"),
        ({"initial_backoff": -1.0}, "initial_backoff: -1.0"),
        ({"initial_backoff": 11.0}, "initial_backoff: 11.0"),
    ],
)
def test_bad_policies_are_refused(arguments: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RetryPolicy(**arguments)  # type: ignore[arg-type]
