"""The cache of the Hugging Face hub as huggingface_hub keeps it, for tests."""

import hashlib
from pathlib import Path

COMMIT = "c" * 40


def cached_snapshot(cache: Path, files: Path, name: str = "a", *, is_shared: bool = False) -> Path:
    """Moves the files of a folder into the cache; answers the snapshot, which has links to them.

    is_shared: the weights are in the store of all repositories, to which that of their own has links.
    """
    repository = cache / f"models--org--{name}"
    folder, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for place in (folder, blobs):
        place.mkdir(parents=True, exist_ok=True)
    for file in list(files.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        (folder / file.name).symlink_to(f"../../blobs/{digest}")
        if is_shared and file.suffix == ".safetensors":
            store = cache / "blobs" / digest[:2]
            store.mkdir(parents=True, exist_ok=True)
            file.rename(store / digest)
            (blobs / digest).symlink_to(f"../../blobs/{digest[:2]}/{digest}")
        else:
            file.rename(blobs / digest)
    return folder
