"""deltactl slots, capacity, model, health."""

import argparse

from deltaplane.cli import connection, show, tables
from deltaplane.cli.arguments import Add


def add_commands(add: Add) -> None:
    """Adds the commands that show the server as a whole."""
    add("slots", "list the device slots and the adapters in them", slots)
    parser = add("capacity", "show what each tier holds, and how many more adapters fit", capacity)
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        default=[],
        help="a rank to answer for, of LoRA alone: DoRA takes what one rank more does, and biases what yet "
        "another does; may be given again",
    )
    add("model", "show the base model and the limits of a request", model)
    add("health", "ask both planes whether they are serving; exit code 1 unless both are", health)


def slots(arguments: argparse.Namespace) -> int:
    with connection.admin_client(arguments) as client:
        found = client.slots(timeout=arguments.timeout)
    if arguments.json:
        show.print_json([show.as_json(slot) for slot in found])
    else:
        tables.show_slots(found)
    return 0


def capacity(arguments: argparse.Namespace) -> int:
    with connection.admin_client(arguments) as client:
        found = client.capacity(arguments.rank, timeout=arguments.timeout)
    if arguments.json:
        show.print_json(show.as_json(found))
    else:
        tables.show_capacity(found)
    return 0


def model(arguments: argparse.Namespace) -> int:
    with connection.client(arguments) as client:
        found = client.model(timeout=arguments.timeout)
    if arguments.json:
        show.print_json(show.as_json(found))
    else:
        tables.show_model(found)
    return 0


def health(arguments: argparse.Namespace) -> int:
    with connection.client(arguments) as client:
        planes = {
            "data plane": (arguments.address, client.is_serving(timeout=arguments.timeout)),
            "control plane": (arguments.admin_address, client.adapters.is_serving(timeout=arguments.timeout)),
        }
    if arguments.json:
        show.print_json({name.replace(" ", "_"): is_serving for name, (_, is_serving) in planes.items()})
    else:
        show.print_facts(
            {
                name: f"{'serving' if is_serving else 'not serving'} at {address}"
                for name, (address, is_serving) in planes.items()
            }
        )
    return 0 if all(is_serving for _, is_serving in planes.values()) else 1
