"""The version of this distribution, which the build reads too."""

VERSION = "0.1.0"
