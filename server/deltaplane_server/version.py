"""The version of this distribution."""

from importlib.metadata import version

VERSION = version("deltaplane")
