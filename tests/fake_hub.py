"""A Hugging Face hub in this process, as far as an adapter's files are concerned, and its store of files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from http_host import Asked, Fault, HttpHost, http_host, redirect, status

TOKEN = "hf_a-token-of-this-server"
COMMIT, NEXT_COMMIT = "a" * 40, "b" * 40


@dataclass
class FakeHub:
    """Answers the calls of huggingface_hub, and sends its clients on to a store for the bytes.

    host: the hub. store: where its files are; it wants the signature that the hub gave its client.
    """

    host: HttpHost
    store: HttpHost

    def publish(
        self,
        repository: str,
        files: Mapping[str, bytes],
        commit: str = COMMIT,
        revision: str = "main",
        private: bool = False,
    ) -> None:
        """Gives a repository a revision, whose name means this commit from now on."""
        if private:
            for path in (f"/api/models/{repository}", f"/{repository}/"):
                self._private.add(path)
        for name, content in files.items():
            at = f"/{repository}/resolve/{commit}/{name}"
            self.store.files[f"/blobs{at}"] = content
            self.host.files[at] = b""
        listing = {"id": repository, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        for known in (revision, commit):
            path = f"/api/models/{repository}/revision/{known.replace('/', '%2F')}"
            self.host.files[path] = json.dumps(listing).encode()

    def __post_init__(self) -> None:
        self._private: set[str] = set()
        self.host.check = self._check
        self.store.check = lambda asked: None if asked.path.endswith("?signature=s") else status(403)

    def _check(self, asked: Asked) -> Fault | None:
        is_private = any(asked.path.startswith(path) for path in self._private)
        if is_private and asked.headers.get("authorization") != f"Bearer {TOKEN}":
            return status(401, b"{}", X_Error_Code="RepoNotFound")
        if asked.path in self.host.files:
            if "/resolve/" in asked.path:
                return redirect(f"{self.store.url}/blobs{asked.path}?signature=s")
            return None
        if asked.path.startswith("/api/models/"):
            repository, _, revision = asked.path.removeprefix("/api/models/").partition("/revision/")
            exists = revision and any(f"/{repository}/revision/" in path for path in self.host.files)
            code = "RevisionNotFound" if exists else "RepoNotFound"
            return status(404, b"{}", X_Error_Code=code)
        return status(404, b"", X_Error_Code="EntryNotFound")


@contextmanager
def fake_hub(patch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub of huggingface_hub meanwhile."""
    import huggingface_hub.constants as constants

    with http_host() as host, http_host() as store:
        patch.setattr(constants, "ENDPOINT", host.url)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", host.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.delenv("HF_TOKEN", raising=False)
        patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield FakeHub(host, store)
