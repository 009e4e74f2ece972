"""How deltactl reaches a server: options of the command line, and variables of the environment."""

import argparse
import os
from collections.abc import Callable

from deltaplane.aio.client import AsyncClient
from deltaplane.blocking.adapters import AdapterClient
from deltaplane.blocking.client import Client
from deltaplane.channel import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, ChannelConfig
from deltaplane.cli import arguments as kinds
from deltaplane.credentials import tls_credentials, token_from_file

Default = Callable[[object], object]
"""Of an option's default: as it is, or suppressed."""


def add_options(parser: argparse.ArgumentParser, default: Default) -> None:
    """Adds the options that say where the server is and what it is shown."""
    group = parser.add_argument_group("server")
    for flag, place, address in (
        ("--address", "the data plane", DEFAULT_ADDRESS),
        ("--admin-address", "the control plane", DEFAULT_ADMIN_ADDRESS),
    ):
        variable = _variable(flag)
        group.add_argument(
            flag,
            type=kinds.address,
            metavar="HOST:PORT",
            default=default(os.environ.get(variable, address)),
            help=f"{place} (default: ${variable}, else {address})",
        )
    group.add_argument(
        "--tls",
        action="store_true",
        default=default(os.environ.get("DELTAPLANE_TLS", "0") not in ("", "0")),
        help="speak TLS, as any other --tls option has it (default: where $DELTAPLANE_TLS is 1)",
    )
    for flag, metavar, text in (
        ("--tls-ca-file", "FILE", "authorities of the server's certificate; else gRPC's own"),
        ("--tls-cert-file", "FILE", "certificate of this client"),
        ("--tls-key-file", "FILE", "private key of the certificate"),
        (
            "--tls-server-name",
            "NAME",
            "name in the server's certificate, where it is not that of its address",
        ),
        ("--token-file", "FILE", "token for the data plane; else $DELTAPLANE_TOKEN"),
        ("--admin-token-file", "FILE", "token for the control plane; else $DELTAPLANE_ADMIN_TOKEN"),
    ):
        variable = _variable(flag)
        group.add_argument(
            flag,
            metavar=metavar,
            default=default(os.environ.get(variable)),
            help=f"{text} (default: ${variable})",
        )


def client(arguments: argparse.Namespace) -> Client:
    """A client of both planes. Errors: InvalidArgumentError (a file cannot be used)."""
    return Client(
        arguments.address,
        arguments.admin_address,
        channel=_data_channel(arguments),
        admin_channel=_admin_channel(arguments),
    )


def async_client(arguments: argparse.Namespace) -> AsyncClient:
    """The same for asyncio."""
    return AsyncClient(
        arguments.address,
        arguments.admin_address,
        channel=_data_channel(arguments),
        admin_channel=_admin_channel(arguments),
    )


def admin_client(arguments: argparse.Namespace) -> AdapterClient:
    """A client of the control plane. Errors: as those of client()."""
    return AdapterClient(arguments.admin_address, channel=_admin_channel(arguments))


def _data_channel(arguments: argparse.Namespace) -> ChannelConfig:
    return _channel(arguments, arguments.token_file, "DELTAPLANE_TOKEN")


def _admin_channel(arguments: argparse.Namespace) -> ChannelConfig:
    return _channel(arguments, arguments.admin_token_file, "DELTAPLANE_ADMIN_TOKEN")


def _channel(arguments: argparse.Namespace, token_file: str | None, variable: str) -> ChannelConfig:
    files = (arguments.tls_ca_file, arguments.tls_cert_file, arguments.tls_key_file)
    server_name = arguments.tls_server_name
    has_tls = arguments.tls or server_name is not None or any(file is not None for file in files)
    return ChannelConfig(
        credentials=tls_credentials(*files) if has_tls else None,
        token=token_from_file(token_file) if token_file else os.environ.get(variable) or None,
        options=[("grpc.ssl_target_name_override", server_name)] if server_name else (),
    )


def _variable(flag: str) -> str:
    """DELTAPLANE_ADMIN_ADDRESS for --admin-address."""
    return "DELTAPLANE_" + flag.strip("-").upper().replace("-", "_")
