"""What a value on the command line may look like. Each function is an argparse type: text in, value out."""

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from deltaplane_server.adapters.remote.addresses import Address, is_remote, parse_address, parse_prefix
from deltaplane_server.config import LoraModule

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<suffix>i?B)?", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def size(text: str) -> int:
    """Bytes: "1073741824", "1GiB" and "1G" are the same; "1GB" is a thousand million. At least 1."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number with a unit such as 512MiB or 4G"
        )
    base = 1000 if (match["suffix"] or "").upper() == "B" and match["unit"] else 1024
    nbytes = int(float(match["number"]) * base ** _POWER[match["unit"].upper()])
    if nbytes < 1:
        raise ArgumentTypeError(f"{text!r} is no room at all; give at least 1 byte")
    return nbytes


def port(text: str) -> int:
    """A TCP port; 0 takes a free one."""
    return _integer(text, 0, 65535, "a port")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _integer(text, 1, 2**31 - 1, "a number")


def count(text: str) -> int:
    """A whole number of at least 0."""
    return _integer(text, 0, 2**31 - 1, "a number")


def seed(text: str) -> int:
    """A seed of 64 bits."""
    return _integer(text, 0, 2**64 - 1, "a seed")


def lora_rank(text: str) -> int:
    """The highest rank of an adapter."""
    return _integer(text, 1, 512, "a rank")


def _integer(text: str, low: int, high: int, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not {what}; give a whole number") from None
    if not low <= value <= high:
        raise ArgumentTypeError(f"{value} is not {what} from {low} to {high}")
    return value


def share(text: str) -> float:
    """A share in (0, 1]."""
    value = _number(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text} is not a share; give a number above 0 and at most 1, such as 0.9")
    return value


def seconds(text: str) -> float:
    """Seconds, at least 0."""
    value = _number(text)
    if value < 0:
        raise ArgumentTypeError(f"{text} is below 0; give seconds, such as 30")
    return value


def positive_seconds(text: str) -> float:
    """Seconds, more than 0."""
    value = _number(text)
    if value <= 0:
        raise ArgumentTypeError(f"{text} is no time at all; give seconds, such as 30")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value


def lora_module(text: str) -> LoraModule:
    """name=source of an adapter: a folder with adapter_config.json in it, or a remote address."""
    name, equals, source = text.partition("=")
    if not equals or not name or not source:
        raise ArgumentTypeError(
            f"{text!r} is not name=path; write, for example, legal-brief=/adapters/legal-brief"
        )
    if _ADAPTER_NAME.fullmatch(name) is None:
        raise ArgumentTypeError(
            f"the name {name[:140]!r} must be 1 to 128 characters of A-Z, a-z, 0-9, '.', '_', '-'"
        )
    if is_remote(source):
        return LoraModule(name, str(_address(parse_address, source)))
    folder = existing_folder(source)
    if not (folder / "adapter_config.json").is_file():
        raise ArgumentTypeError(
            f"{folder} of adapter {name} holds no adapter_config.json; give the folder that PEFT's "
            "save_pretrained wrote"
        )
    return LoraModule(name, str(folder))


def adapter_source(text: str) -> Address:
    """What remote adapters may lie under, such as hf://my-org/ or https://models.example.com/adapters/."""
    return _address(parse_prefix, text)


def _address(parse: Callable[[str], Address], text: str) -> Address:
    try:
        address = parse(text)
        parse_prefix(str(address))  # http:// is for this machine alone
    except ValueError as error:
        raise ArgumentTypeError(f"no address of adapters: {error}") from None
    return address


def existing_folder(text: str) -> Path:
    """A folder that is there."""
    folder = Path(text).expanduser()
    if not folder.exists():
        raise ArgumentTypeError(f"there is no folder {folder}; check the path")
    if not folder.is_dir():
        raise ArgumentTypeError(f"{folder} is a file; give its folder")
    return folder.absolute()
