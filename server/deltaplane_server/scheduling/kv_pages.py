"""KV pages: who holds which, and which ones still hold a prefix worth finding again. No tensor, only ids.

PagedAttention (Kwon et al. 2023) with the hash-chained prefix cache that vLLM made of it, kept apart for
each adapter version.
"""

import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from deltaplane_server.scheduling.lease import AdapterUid, members
from deltaplane_server.scheduling.sequence import Sequence

_DIGEST_BYTES = 16


class KvPages:
    """A fixed number of pages of `page_size` tokens each, given to sequences and taken back.

    With prefix caching, a full page is found again by the digest of its tokens and of all tokens before
    them. Digests are 128 bits of BLAKE2b, chained from a secret of this process: a chance collision among
    2^40 pages has odds of 2^-49, and nobody can search for one without the secret, so that finding a digest
    is proof enough. Each adapter version, each composition with its weights, and the base model has a table
    of its own: KV is shared between no two of them, whatever the digests.

    A cached page that nobody holds is idle: it counts as free, and is given away least recently used first,
    a sequence's last pages before its first ones.
    """

    def __init__(self, num_pages: int, page_size: int = 16, *, enable_prefix_caching: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.queries = 0
        self.hits = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._tables: dict[AdapterUid, dict[bytes, int]] = {}
        self._keys: list[tuple[AdapterUid, bytes] | None] = [None] * num_pages
        self._secret = os.urandom(_DIGEST_BYTES)

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds, idle ones included."""
        return len(self._free) + len(self._idle)

    def fits(self, sequence: Sequence, spare: int = 0) -> bool:
        """Whether a sequence without pages can get them for all its tokens and leave `spare` ones free."""
        needed = -(-sequence.num_tokens // self.page_size) + spare
        if needed <= self.num_free:
            return True
        shared = sum(1 for page in self._find_prefix(sequence) if self._holders[page])
        return needed - shared <= self.num_free

    def allocate(self, sequence: Sequence) -> None:
        """Gives a sequence that fits pages for all its tokens; those found in the cache count as computed.

        At least one token is left to compute, since the next one is drawn from it.
        """
        pages = self._find_prefix(sequence)
        for page in pages:
            self._hold(page)
        sequence.num_computed = len(pages) * self.page_size
        if self.enable_prefix_caching:
            self.queries += sequence.num_tokens
            self.hits += sequence.num_computed
        num_new = -(-sequence.num_tokens // self.page_size) - len(pages)
        pages.extend(self._take() for _ in range(num_new))
        sequence.pages = pages

    def extend(self, sequence: Sequence) -> bool:
        """Sees to it that the sequence's newest token has a page; false where none is free."""
        if sequence.num_tokens <= len(sequence.pages) * self.page_size:
            return True
        if not self.num_free:
            return False
        sequence.pages.append(self._take())
        return True

    def cache(self, sequence: Sequence, start: int, end: int) -> None:
        """Lets the pages that tokens `start` to `end`, now computed, have filled up be found by others."""
        if not self.enable_prefix_caching:
            return
        pages = range(start // self.page_size, end // self.page_size)
        if not pages:
            return
        table = self._tables.setdefault(sequence.adapter_uid, {})
        for index in pages:
            page, digest = sequence.pages[index], self._digest(sequence, index)
            if table.setdefault(digest, page) == page:
                self._keys[page] = (sequence.adapter_uid, digest)

    def free(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence back; what was cached may still be found."""
        for page in reversed(sequence.pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._keys[page] is not None:
                self._idle[page] = None
            else:
                self._free.append(page)
        sequence.pages = []
        sequence.num_computed = 0

    def forget(self, uid: int) -> None:
        """Drops what is cached of an adapter version that is gone, and of compositions with it. Its uid is
        never used again, so this only makes room sooner."""
        for table in [table for table in self._tables if uid in members(table)]:
            for page in self._tables.pop(table).values():
                self._keys[page] = None
                if page in self._idle:
                    del self._idle[page]
                    self._free.append(page)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that the books balance; `sequences`: all that may hold pages."""
        held: Counter[int] = Counter()
        for sequence in sequences:
            assert len(set(sequence.pages)) == len(sequence.pages), f"{sequence.id} holds a page twice"
            assert sequence.num_computed <= len(sequence.pages) * self.page_size
            held.update(sequence.pages)
        assert [held[page] for page in range(self.num_pages)] == self._holders, "holders are miscounted"
        unheld = [*self._free, *self._idle]
        assert len(set(unheld)) == len(unheld), "a page is free twice"
        assert set(unheld) == {page for page in range(self.num_pages) if not held[page]}, "a page is lost"
        cached = {page: (uid, digest) for uid, t in self._tables.items() for digest, page in t.items()}
        assert cached == {page: key for page, key in enumerate(self._keys) if key is not None}
        assert self._idle.keys() <= cached.keys(), "an idle page is not cached"
        assert cached.keys().isdisjoint(self._free), "a free page is cached"

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        table = self._tables.get(sequence.adapter_uid)
        if table is None:
            return []
        pages: list[int] = []
        for index in range((sequence.num_tokens - 1) // self.page_size):
            page = table.get(self._digest(sequence, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """The digest of a sequence's full page; each is computed once, in order."""
        digests = sequence.page_digests
        for i in range(len(digests), index + 1):
            parent = digests[-1] if digests else self._secret
            tokens = array("I", sequence.tokens[i * self.page_size : (i + 1) * self.page_size])
            digests.append(blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest())
        return digests[index]

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self._idle.pop(page, None)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._uncache(page)
        self._holders[page] = 1
        return page

    def _uncache(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        uid, digest = key
        del self._tables[uid][digest]
        if not self._tables[uid]:
            del self._tables[uid]
        self._keys[page] = None
