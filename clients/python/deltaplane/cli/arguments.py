"""Values of the command line, and what a command is."""

import argparse
import math
import os
from collections.abc import Callable

Command = Callable[[argparse.Namespace], int]
"""Runs with the parsed arguments and answers the exit code."""

Add = Callable[[str, str, Command], argparse.ArgumentParser]
"""Adds a command under a name with a line of help, and answers its parser."""


def address(text: str) -> str:
    """HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; give HOST:PORT, such as localhost:50051")
    return text


def seconds(text: str) -> float:
    """A time of zero or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return value


def adapters(text: str) -> tuple[str, dict[str, float]]:
    """NAME, or several to add up: NAME[:WEIGHT]+NAME[:WEIGHT]... Answers the text, and weights of several."""
    weights: dict[str, float] = {}
    for term in text.split("+"):
        name, colon, weight = term.partition(":")
        try:
            value = float(weight) if colon else 1.0
        except ValueError:
            value = math.nan
        if not name or name in weights or not math.isfinite(value):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no adapter, nor several to add up; give NAME, or such as legal:0.7+story:0.3"
            )
        weights[name] = value
    return text, {} if text in weights else weights


def label(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no label; give KEY=VALUE")
    return key, value


def source(text: str) -> str:
    """A folder: made absolute where it is on this machine too, else left for the server to find."""
    return os.path.abspath(text) if os.path.isdir(text) else text
