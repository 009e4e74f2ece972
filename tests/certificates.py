"""Certificates of authorities that a test makes."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """A certificate with its chain, and its key, in PEM files."""

    certificate: Path
    key: Path


class Authority:
    """An authority whose files lie in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str = "server", *, host: str = "127.0.0.1", starts_in_days: int = -1) -> Pair:
        """A certificate of 31 days, by default for a server on this machine."""
        begin = datetime.now(UTC) + timedelta(days=starts_in_days)
        made = self._ca.issue_cert(host, not_before=begin, not_after=begin + timedelta(days=31))
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(pair.key))
        return pair
