"""The adapters that there are, by name."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from deltaplane_controlplane.catalogue import StoredAdapter
from deltaplane_controlplane.errors import NotFoundError
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.versions import Adapter, Version


class Registry:
    """Names to adapters, deleted ones that still drain among them. Guarded by the manager's monitor."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._names: list[str] = []
        self._uids = itertools.count(1)

    def __len__(self) -> int:
        """Adapters that are registered, those that drain left out."""
        return sum(not adapter.deleted for adapter in self._adapters.values())

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    @property
    def names(self) -> list[str]:
        """All names in order, in a list of the caller's own."""
        return self._names.copy()

    def find(self, name: str) -> Adapter | None:
        """The adapter of this name, or the deleted one that still drains."""
        return self._adapters.get(name)

    def find_registered(self, name: str) -> Adapter | None:
        """The registered adapter of this name."""
        adapter = self._adapters.get(name)
        return None if adapter is None or adapter.deleted else adapter

    def get(self, name: str) -> Adapter:
        """The registered adapter of this name. Errors: NotFoundError."""
        adapter = self.find_registered(name)
        if adapter is None:
            raise not_found(name)
        return adapter

    def add(
        self,
        name: str,
        number: int,
        manifest: AdapterManifest,
        labels: Mapping[str, str],
        now: float,
        revision: int,
    ) -> Adapter:
        """Adds an adapter. Versions of a deleted one of this name that still drain become its others."""
        draining = self._adapters.get(name)
        adapter = Adapter(name, now, now, revision, labels)
        adapter.current = self.new_version(adapter, number, manifest)
        if draining is None:
            insort(self._names, name)
        else:
            adapter.others = tuple(sorted(draining.versions, key=lambda v: v.number))
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
            stored.pinned_tier,
        )
        versions = {n: self.new_version(adapter, n, manifest) for n, manifest in stored.versions.items()}
        adapter.current = versions.pop(stored.current)
        adapter.others = tuple(versions[number] for number in sorted(versions))
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
            del self._adapters[adapter.name]
            del self._names[bisect_left(self._names, adapter.name)]

    def check_integrity(self) -> None:
        assert self._names == sorted(self._adapters)
        for name, adapter in self._adapters.items():
            numbers = [version.number for version in adapter.versions]
            assert adapter.name == name
            assert len(set(numbers)) == len(numbers), f"{name} has a version number twice: {numbers}"
            assert [v.number for v in adapter.others] == sorted(v.number for v in adapter.others)
            assert all(version.adapter is adapter for version in adapter.versions)
            assert adapter.current.draining == adapter.deleted
            assert not adapter.deleted or (
                adapter.pinned_tier is None and all(v.draining for v in adapter.versions)
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
