"""deltactl operations ...: calls that take their time."""

import argparse
from collections.abc import Callable

from deltaplane.blocking.operations import OperationClient
from deltaplane.cli import connection, show, tables
from deltaplane.cli.arguments import Add, Command
from deltaplane.v1.operations_pb2 import Operation

_FILTER_HELP = 'terms joined by AND, such as "done=false AND kind=REGISTER AND adapter=name"'


def add_commands(add: Add) -> None:
    """Adds the commands of `deltactl operations`."""
    listing = add("list", "list the operations, the newest first", list_operations)
    listing.add_argument("--filter", default="", help=_FILTER_HELP)
    for name, text, command in (
        ("get", "show one operation", _one(lambda client, a: client.get(a.id, timeout=a.timeout))),
        ("wait", "wait for the end of an operation and show the adapter", wait),
        (
            "cancel",
            "ask an operation to end",
            _one(lambda client, a: client.cancel(a.id, timeout=a.timeout)),
        ),
    ):
        add(name, text, command).add_argument("id", help="the operation")


def _one(call: Callable[[OperationClient, argparse.Namespace], Operation]) -> Command:
    """The command that makes a call and shows the operation it answers."""

    def command(arguments: argparse.Namespace) -> int:
        with connection.admin_client(arguments) as client:
            found = call(client.operations, arguments)
        if arguments.json:
            show.print_json(show.as_json(found))
        else:
            tables.show_operation(found)
        return 0

    return command


def list_operations(arguments: argparse.Namespace) -> int:
    with connection.admin_client(arguments) as client:
        found = list(client.operations.list(arguments.filter, timeout=arguments.timeout))
    if arguments.json:
        show.print_json([show.as_json(operation) for operation in found])
    else:
        tables.show_operations(found)
    return 0


def wait(arguments: argparse.Namespace) -> int:
    with connection.admin_client(arguments) as client:
        found = client.operations.wait(arguments.id, timeout=arguments.timeout)
    if arguments.json:
        show.print_json(show.as_json(found))
    else:
        tables.show_adapter(found)
    return 0
