"""What an upload is to become."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltaplane_controlplane.versions import Tier


@dataclass(frozen=True, slots=True)
class UploadTerms:
    """The header of an upload, but for the sizes of its files.

    digests: SHA-256 of each file, by name.
    replace: it becomes the next version of the adapter of this name, which must have `etag` where one is
        given, and whose version before is kept for a rollback with `keep_previous`.
    load_tier: where to bring it at once.
    """

    name: str
    digests: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    replace: bool = False
    etag: str = ""
    keep_previous: bool = False
    load_tier: Tier | None = None
    validate_only: bool = False
    idempotency_key: str = ""

    @property
    def key(self) -> str:
        """The idempotency key, where one counts."""
        return "" if self.validate_only else self.idempotency_key

    @property
    def request(self) -> tuple[object, ...]:
        """What must be equal where a key comes again."""
        return (
            "upload",
            self.name,
            *sorted(self.digests.items()),
            *sorted(self.labels.items()),
            self.replace,
            self.etag,
            self.keep_previous,
            self.load_tier,
        )
