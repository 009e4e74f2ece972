"""The command line of deltactl."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from deltaplane.cli import adapters, connection, generate, operations, server, show
from deltaplane.cli import arguments as kinds
from deltaplane.cli.arguments import Add, Command
from deltaplane.errors import DeltaplaneError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; answers the exit code: 1 where a call failed, 2 where the command line is wrong."""
    arguments = argument_parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except DeltaplaneError as error:
        show.print_error(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage that hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def argument_parser() -> argparse.ArgumentParser:
    """All commands; `command` of what it parses is the one to run."""
    parser = _OneLineParser(
        prog="deltactl",
        description="Administers a deltaplane server and generates from it.",
        parents=[_common(is_root=True)],
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    group = commands.add_parser(
        "adapters", help="see and change the adapters", description="See and change the adapters."
    )
    adapters.add_commands(_adder(group.add_subparsers(required=True, metavar="COMMAND")))
    group = commands.add_parser(
        "operations",
        help="follow and cancel calls that take their time",
        description="Follow and cancel calls that take their time.",
    )
    operations.add_commands(_adder(group.add_subparsers(required=True, metavar="COMMAND")))
    server.add_commands(_adder(commands))
    generate.add_command(_adder(commands))
    return parser


def _adder(commands: "argparse._SubParsersAction[_OneLineParser]") -> Add:
    def add(name: str, text: str, command: Command) -> argparse.ArgumentParser:
        parser = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            parents=[_common(is_root=False)],
            allow_abbrev=False,
        )
        parser.set_defaults(command=command)
        return parser

    return add


def _common(*, is_root: bool) -> _OneLineParser:
    """The options that stand before or after a command; after it they have no defaults that would win."""
    parser = _OneLineParser(add_help=False)

    def default(value: object) -> object:
        return value if is_root else argparse.SUPPRESS

    connection.add_options(parser, default)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--timeout",
        type=kinds.seconds,
        metavar="SECONDS",
        default=default(None),
        help="how long a call may take (default: as long as it needs)",
    )
    group.add_argument(
        "--json", action="store_true", default=default(False), help="print the answer as protobuf's JSON"
    )
    return parser
