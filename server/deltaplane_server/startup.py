"""What can keep a server from starting."""


class StartupError(Exception):
    """The server cannot start as it was asked to. The message is one line: what, and how to mend it."""


def one_line(error: BaseException) -> str:
    """An error as one line for people."""
    return " ".join(str(error).split()) or type(error).__name__
