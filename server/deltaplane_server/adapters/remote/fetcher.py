"""Brings adapters from hubs, web servers and buckets to the server's own folder."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2
import structlog

from deltaplane_controlplane.adapter_store import AdapterStore, IncomingFolder, disk_errors
from deltaplane_controlplane.errors import ResourceExhaustedError, UnavailableError
from deltaplane_controlplane.ports import FetchedSource, Progress
from deltaplane_server.adapters.remote.addresses import Address, AllowedSources, is_remote, same_adapter
from deltaplane_server.adapters.remote.host import FileBounds, RemoteHost
from deltaplane_server.adapters.remote.network import Network
from deltaplane_server.adapters.remote.retries import COME_BACK_S, Retries
from deltaplane_server.adapters.remote.transfer import RemoteFile, Transfer

STAGE = "fetch"

_POLL_S = 0.1
_NUM_FILES = 2
_BUSY_RETRY_S = 5.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of fetches.

    max_at_once: whose bytes are coming. max_under_way: these and those that wait for their turn.
    connect_timeout_s, stall_timeout_s: for a connection, and how long a server may then send nothing.
    total_timeout_s: for all of an adapter from its turn on, tries and waits between them included; it ends
        what never stalls and never ends, such as a server that sends a byte now and then.
    """

    max_at_once: int = 4
    max_under_way: int = 12
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    total_timeout_s: float = 1800.0
    retries: Retries = field(default_factory=Retries)


@dataclass(slots=True, eq=False)
class _Flight:
    """The one fetch of an address, shared by all who want it meanwhile.

    source: the resolved address, once all files are there.
    waiters: who want it; guarded by the fetcher's lock.
    landing: held while the files are put where one of them wants them.
    """

    address: Address
    folder: IncomingFolder
    transfers: list[Transfer] = field(default_factory=list)
    source: Future[str] = field(default_factory=Future)
    waiters: int = 0
    landing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> tuple[int, int | None]:
        """How many have come, of how many; None while nobody knows."""
        transfers = self.transfers.copy()
        totals = [transfer.total for transfer in transfers if transfer.total is not None]
        received = sum(transfer.received for transfer in transfers)
        return received, sum(totals) if len(totals) == _NUM_FILES else None


class RemoteFetcher:
    """The SourceFetcher of a server. Safe for all threads.

    Files come on a thread of their own into a hidden folder of the store, which is put in its place when all
    of it is on disk. Calls for the same address share one fetch, and each gets a folder of its own, whose
    files share their bytes on disk. A fetch that nobody waits for any more is cancelled.
    """

    def __init__(
        self,
        store: AdapterStore,
        allowed: AllowedSources,
        bounds: FileBounds,
        limits: FetchLimits | None = None,
    ) -> None:
        """Starts nothing: the first fetch does."""
        self._store = store
        self._allowed = allowed
        self._bounds = bounds
        self._limits = limits or FetchLimits()
        self._turns = asyncio.Semaphore(self._limits.max_at_once)
        self._lock = threading.Lock()
        self._flights: dict[Address, _Flight] = {}
        self._hosts: dict[str, RemoteHost] = {}
        self._network: Network | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Callers that wait for a fetch."""
        with self._lock:
            return sum(flight.waiters for flight in self._flights.values())

    def handles(self, source: str) -> bool:
        """Whether this is a remote source, good or not, instead of the path of a folder."""
        return is_remote(source)

    def check(self, source: str) -> str:
        """The one way to write a source, without credentials. Errors: InvalidArgumentError (malformed, not
        allowed)."""
        return str(self._allowed.resolve(source))

    def is_from(self, known: str, source: str) -> bool:
        """Whether the files of a resolved address may be those of a source."""
        return same_adapter(source, known)

    def fetch(self, source: str, progress: Progress) -> FetchedSource:
        """Fetches the files of an adapter into a folder that is the caller's. Reports the stage "fetch" in
        bytes, and checks the progress several times a second.

        Errors: InvalidArgumentError (malformed, not allowed, not there, too large), FailedPreconditionError
        (this server is not set up for it), UnavailableError (it does not answer now, or the server stops),
        ResourceExhaustedError (too many fetches, no disk), InternalError (the disk), CancelledError.
        """
        flight = self._board(self._allowed.resolve(source))
        try:
            resolved = self._await_source(flight, progress)
            return FetchedSource(self._land(flight), resolved)
        except BaseException:
            self._leave(flight)
            raise

    def close(self) -> None:
        """Cancels all fetches and waits for their end; later ones are refused. Idempotent."""
        with self._lock:
            self._closed = True
            network, self._network = self._network, None
        if network is not None:
            network.close()

    def _board(self, address: Address) -> _Flight:
        with self._lock:
            if self._closed:
                raise _stopping()
            flight = self._flights.get(address)
            if flight is None:
                flight = self._start(address)
            flight.waiters += 1
            return flight

    def _start(self, address: Address) -> _Flight:
        if len(self._flights) >= self._limits.max_under_way:
            raise ResourceExhaustedError(
                f"{len(self._flights)} adapters are being fetched, and no more are taken: try later",
                reason="TOO_MANY_FETCHES",
                retry_after_s=_BUSY_RETRY_S,
            )
        if self._network is None:
            self._network = Network(self._limits.connect_timeout_s, self._limits.stall_timeout_s)
        host = self._host(address.scheme)
        flight = _Flight(address, IncomingFolder(self._store, "fetch"))
        self._flights[address] = flight
        flight.source = self._network.start(partial(self._fly, flight, host))
        return flight

    def _host(self, scheme: str) -> RemoteHost:
        if scheme not in self._hosts:
            self._hosts[scheme] = _make_host(scheme, self._allowed, self._bounds)
        return self._hosts[scheme]

    def _await_source(self, flight: _Flight, progress: Progress) -> str:
        while True:
            progress.check()
            done, _ = wait_for([flight.source], _POLL_S)
            progress.report(STAGE, *flight.num_bytes)
            if done:
                break
        try:
            return flight.source.result()
        except FutureCancelledError:
            raise _stopping() from None

    def _land(self, flight: _Flight) -> Path:
        """Gives the files to one who waits for them: the last takes the folder, the others get links."""
        with flight.landing:
            with self._lock:
                is_last = flight.waiters == 1
            if is_last:
                return flight.folder.commit()
            place = flight.folder.copy().commit()
        self._leave(flight)
        return place

    def _leave(self, flight: _Flight) -> None:
        """The last to leave ends the fetch, and removes what has come of it."""
        with self._lock:
            flight.waiters -= 1
            if flight.waiters:
                return
            self._forget(flight)
        flight.source.cancel()
        flight.folder.discard()

    def _forget(self, flight: _Flight) -> None:
        """Whoever comes now begins a fetch anew."""
        if self._flights.get(flight.address) is flight:
            del self._flights[flight.address]

    async def _fly(self, flight: _Flight, host: RemoteHost, client: httpx2.AsyncClient) -> str:
        begun = time.monotonic()
        retries, shown = self._limits.retries, str(flight.address)
        try:
            async with self._turns, self._in_time(flight):
                remote = await retries.run(shown, partial(host.resolve, flight.address))
                for file in remote.files:
                    await self._bring(flight, file, client)
        except BaseException:
            flight.folder.discard()
            raise
        finally:
            with self._lock:
                self._forget(flight)
        _log.info(
            "adapter.fetched",
            source=remote.source,
            bytes=sum(transfer.received for transfer in flight.transfers),
            ms=round(1e3 * (time.monotonic() - begun), 1),
        )
        return remote.source

    @asynccontextmanager
    async def _in_time(self, flight: _Flight) -> AsyncIterator[None]:
        """Errors: UnavailableError, where it takes longer than it may."""
        limit_s = self._limits.total_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            received, total = flight.num_bytes
            of_total = "" if total is None else f" of {total}"
            raise UnavailableError(
                f"{flight.address} cannot be fetched within {limit_s:g} s: {received}{of_total} bytes have "
                "come; try later, or raise --fetch-timeout",
                reason="SOURCE_TOO_SLOW",
                retry_after_s=COME_BACK_S,
            ) from error

    async def _bring(self, flight: _Flight, file: RemoteFile, client: httpx2.AsyncClient) -> None:
        with flight.folder.create(file.name) as sink:
            transfer = Transfer(client, file, sink)
            flight.transfers.append(transfer)
            await transfer.run(self._limits.retries)
            with disk_errors(flight.folder.path):
                await asyncio.to_thread(os.fsync, sink.fileno())


def _make_host(scheme: str, allowed: AllowedSources, bounds: FileBounds) -> RemoteHost:
    """Imports what a kind of host needs when the first address of that kind comes."""
    match scheme:
        case "hf":
            from deltaplane_server.adapters.remote.hub import HubHost

            return HubHost(bounds)
        case "s3":
            from deltaplane_server.adapters.remote.bucket import BucketHost

            return BucketHost(bounds)
    from deltaplane_server.adapters.remote.web import WebHost

    return WebHost(allowed, bounds)


def _stopping() -> UnavailableError:
    return UnavailableError("the server is shutting down")
