"""Futures that tell of ends which nobody can call off."""

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def pending() -> Future[T]:
    """A future that its waiters cannot cancel."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def done(value: T) -> Future[T]:
    """A future with this value."""
    future: Future[T] = pending()
    future.set_result(value)
    return future
