"""Which rank pages of the device are free."""

from collections.abc import Iterable


class RankPageAllocator:
    """Hands out page ids of a pool of `num_pages`. Prefers pages in a row; takes scattered ones otherwise."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = bytearray(b"\x01" * num_pages)
        self.num_free = num_pages

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` pages, which must be free: the first run that is long enough, else the lowest ids."""
        if count > self.num_free:
            raise ValueError(f"{count} rank pages asked for, {self.num_free} are free")
        start = self._free.find(b"\x01" * count)
        pages = range(start, start + count) if start >= 0 else self._lowest(count)
        for page in pages:
            self._free[page] = 0
        self.num_free -= count
        return tuple(pages)

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Giving back a free page is a ValueError."""
        for page in pages:
            if self._free[page]:
                raise ValueError(f"rank page {page} is free already")
            self._free[page] = 1
            self.num_free += 1

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Asserts that exactly the pages of `owned` are taken, each of them once."""
        taken = [page for page, free in enumerate(self._free) if not free]
        assert sorted(owned) == taken, f"pages {taken} are taken, {sorted(owned)} are owned"
        assert self.num_free == self.num_pages - len(taken)

    def _lowest(self, count: int) -> list[int]:
        return [page for page, free in enumerate(self._free) if free][:count]
