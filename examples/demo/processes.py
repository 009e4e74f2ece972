"""Programs that never outlive the one that started them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

STOP_PATIENCE_S = 15.0


@contextmanager
def running(
    command: Sequence[str], *, output: IO[bytes] | None = None, stop: signal.Signals = signal.SIGTERM
) -> Iterator["subprocess.Popen[str]"]:
    """Runs a program and, however this ends, stops it and all that it started.

    It gets a process group of its own, so that Ctrl-C reaches only us and we end it in order.
    output: where what it prints goes; without, standard output is a pipe and standard error is ours.
    stop: the signal that asks it to end.
    """
    process: subprocess.Popen[str] | None = None
    try:
        with _signals_deferred():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.PIPE,
                stderr=subprocess.STDOUT if output else None,
                text=True,
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            with _signals_deferred():
                _stop(process, stop)


def exit_on_sigterm() -> None:
    """Makes SIGTERM and SIGHUP run every `finally` on the way out, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def _stop(process: "subprocess.Popen[str]", stop: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, stop)
    try:
        process.wait(STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM take effect only after the block."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
