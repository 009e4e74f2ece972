"""The adapters that there are, by name."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from deltaplane_controlplane.catalogue import StoredAdapter
from deltaplane_controlplane.errors import AbortedError, FailedPreconditionError, NotFoundError
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.versions import NO_LABELS, NO_PINS, Adapter, Tier, Version


class Registry:
    """Names to adapters, those that are being fetched and deleted ones that still drain among them. Guarded
    by the manager's monitor."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._names: list[str] = []
        self._with_pins: dict[str, Adapter] = {}
        self._uids = itertools.count(1)

    def __len__(self) -> int:
        """Adapters that are registered, those that drain or are being fetched left out."""
        return sum(not (adapter.deleted or adapter.fetching) for adapter in self._adapters.values())

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    @property
    def names(self) -> list[str]:
        """All names in order, in a list of the caller's own."""
        return self._names.copy()

    def find(self, name: str) -> Adapter | None:
        """The adapter of this name, or the one that still drains or is being fetched."""
        return self._adapters.get(name)

    def find_registered(self, name: str) -> Adapter | None:
        """The registered adapter of this name."""
        adapter = self._adapters.get(name)
        return None if adapter is None or adapter.deleted or adapter.fetching else adapter

    def get(self, name: str) -> Adapter:
        """The registered adapter of this name. Errors: NotFoundError, FailedPreconditionError (it is being
        fetched)."""
        adapter = self._adapters.get(name)
        if adapter is not None and adapter.fetching:
            raise is_fetching(name)
        if adapter is None or adapter.deleted:
            raise not_found(name)
        return adapter

    def pinned_in(self, tier: Tier) -> list[Version]:
        """The versions that are pinned in a tier."""
        return [v for adapter in self._with_pins.values() for v in adapter.versions if tier in v.pins]

    @property
    def with_pins(self) -> list[Adapter]:
        """Adapters that are pinned, or have a version that is."""
        return list(self._with_pins.values())

    def note_pins(self, adapter: Adapter) -> None:
        """The pins of an adapter or of its versions have changed."""
        if any(version.pins for version in adapter.versions):
            self._with_pins[adapter.name] = adapter
        else:
            self._with_pins.pop(adapter.name, None)

    def begin_fetch(self, name: str, source: str, now: float) -> Adapter | None:
        """Shows that the files of a new adapter are on their way; None where the name is taken."""
        if name in self._adapters:
            return None
        adapter = Adapter(name, now, now, 0, NO_LABELS, fetching=True)
        adapter.current = self.new_version(adapter, 0, unknown_files(source))
        self._adapters[name] = adapter
        insort(self._names, name)
        return adapter

    def end_fetch(self, adapter: Adapter) -> bool:
        """Forgets what `begin_fetch` showed, and answers True, unless an adapter has taken its place."""
        if self._adapters.get(adapter.name) is not adapter:
            return False
        self._remove(adapter.name)
        return True

    def add(
        self,
        name: str,
        number: int,
        manifest: AdapterManifest,
        labels: Mapping[str, str],
        now: float,
        revision: int,
    ) -> Adapter:
        """Adds an adapter, in the place of one that is being fetched. Versions of a deleted one of this name
        that still drain become its others."""
        former = self._adapters.get(name)
        adapter = Adapter(name, now, now, revision, labels)
        adapter.current = self.new_version(adapter, number, manifest)
        if former is None:
            insort(self._names, name)
        elif former.deleted:
            adapter.others = tuple(sorted(former.versions, key=lambda v: v.number))
            for version in adapter.others:
                version.adapter = adapter
        self._adapters[name] = adapter
        return adapter

    def restore(self, stored: StoredAdapter) -> Adapter:
        """Adds an adapter as it was before a restart; names come in order."""
        adapter = Adapter(
            stored.name,
            stored.create_time,
            stored.update_time,
            stored.revision,
            stored.labels,
            stored.pins,
        )
        versions = {n: self.new_version(adapter, n, manifest) for n, manifest in stored.versions.items()}
        adapter.current = versions.pop(stored.current)
        adapter.others = tuple(versions[number] for number in sorted(versions))
        for version in adapter.others:
            version.kept_pins = stored.version_pins.get(version.number, NO_PINS)
        self.note_pins(adapter)
        self._adapters[stored.name] = adapter
        self._names.append(stored.name)
        return adapter

    def new_version(self, adapter: Adapter, number: int, manifest: AdapterManifest) -> Version:
        return Version(next(self._uids), adapter, number, manifest)

    def drop(self, version: Version) -> None:
        """Forgets a version; with the last of them, the adapter."""
        adapter = version.adapter
        if adapter.current is not version:
            adapter.others = tuple(v for v in adapter.others if v is not version)
        elif adapter.others:
            *others, adapter.current = adapter.others
            adapter.others = tuple(others)
        else:
            self._remove(adapter.name)

    def _remove(self, name: str) -> None:
        del self._adapters[name]
        del self._names[bisect_left(self._names, name)]

    def check_integrity(self) -> None:
        assert self._names == sorted(self._adapters)
        for name, adapter in self._adapters.items():
            numbers = [version.number for version in adapter.versions]
            assert adapter.name == name
            assert len(set(numbers)) == len(numbers), f"{name} has a version number twice: {numbers}"
            assert [v.number for v in adapter.others] == sorted(v.number for v in adapter.others)
            assert all(version.adapter is adapter for version in adapter.versions)
            assert adapter.current.draining == adapter.deleted
            assert not adapter.deleted or all(v.draining for v in adapter.versions)
            assert not (adapter.deleted and adapter.pins)
            assert not adapter.current.kept_pins
            assert not any(v.draining and v.pins for v in adapter.versions)
            assert not adapter.fetching or not (adapter.others or adapter.deleted)
            assert any(v.pins for v in adapter.versions) == (self._with_pins.get(name) is adapter)
        assert self._with_pins.keys() <= self._adapters.keys()


def unknown_files(source: str) -> AdapterManifest:
    """Of files that have not come yet."""
    return AdapterManifest(
        source=source,
        digest="",
        rank=0,
        alpha=0.0,
        rslora=False,
        target_modules=(),
        num_layers=0,
        source_bytes=0,
        host_bytes=0,
        num_pages=0,
    )


def is_fetching(name: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the files of adapter {name!r} are being fetched: wait for its operation, or cancel that",
        reason="ADAPTER_FETCHING",
        metadata={"adapter": name},
    )


def not_found(name: str) -> NotFoundError:
    return NotFoundError(
        f"there is no adapter {name!r}: register it first",
        reason="ADAPTER_NOT_FOUND",
        metadata={"adapter": name},
    )


def no_version(adapter: Adapter, number: int | None) -> NotFoundError:
    """number: None asks for the version before the current one."""
    kept = ", ".join(str(v.number) for v in adapter.versions if not v.draining)
    wanted = "earlier version" if number is None else f"version {number}"
    return NotFoundError(
        f"adapter {adapter.name!r} has no {wanted}; there is {kept}",
        reason="ADAPTER_VERSION_NOT_FOUND",
        metadata={"adapter": adapter.name},
    )


def match_etag(adapter: Adapter, etag: str) -> None:
    """Errors: AbortedError, where there is an etag and it is not the adapter's."""
    if etag and etag != adapter.etag:
        raise AbortedError(
            f"etag: adapter {adapter.name!r} has {adapter.etag!r}, not {etag!r}: it was changed meanwhile; "
            "get it again and decide anew"
        )
