"""SIGTERM and SIGINT."""

import asyncio
import os
import signal


class StopSignals:
    """The first signal asks the server to drain. A second one ends the process at once, and so does the
    first while the server starts: it holds nothing then that could be lost."""

    def __init__(self) -> None:
        """Takes the signals over from the running loop on."""
        self._asked = asyncio.Event()
        self._started = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take, number)

    def server_started(self) -> None:
        """From now on the first signal asks."""
        self._started = True

    async def wait(self) -> None:
        """Returns when the server was asked to drain."""
        await self._asked.wait()

    def _take(self, number: int) -> None:
        if not self._started or self._asked.is_set():
            os._exit(128 + number)
        self._asked.set()
