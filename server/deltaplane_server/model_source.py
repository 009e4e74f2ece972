"""Finds the folder of a model: one that is there, or a Hugging Face id to fetch."""

import re
from pathlib import Path

import structlog

from deltaplane_server.startup import StartupError, one_line

_HUB_ID = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Weights, config, tokenizer and chat template; no pickles, no other frameworks' weights."""

log = structlog.get_logger(__name__)


def find_model(model: str) -> Path:
    """The folder with the model's config.json. Fetches it where `model` is an id and no folder.

    Errors: StartupError.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        folder = _fetch(model)
    if not (folder / "config.json").is_file():
        raise StartupError(
            f"MODEL {model}: there is no config.json in it; give the folder of a Hugging Face model with "
            "config.json, tokenizer and safetensors weights"
        )
    return folder.absolute()


def _fetch(model: str) -> Path:
    if _HUB_ID.fullmatch(model) is None or model.startswith("."):
        raise StartupError(f"MODEL {model}: there is no such folder; check the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    log.info("model.fetching", model=model)
    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise StartupError(
            f"MODEL {model}: there is no such folder, and it could not be fetched from the Hugging Face hub "
            f"({one_line(error)[:200]}); check the name, or give a folder"
        ) from None
