"""deltactl adapters ...: everything about adapters."""

import argparse
from collections.abc import Callable

from deltaplane.blocking.adapters import AdapterClient
from deltaplane.cli import arguments as kinds
from deltaplane.cli import connection, show, tables
from deltaplane.cli.arguments import Add, Command
from deltaplane.v1.adapters_pb2 import Adapter, AdapterEventType, WatchAdaptersResponse

_FILTER_HELP = 'terms joined by AND, such as "state=RESIDENT AND labels.team=search"'


def add_commands(add: Add) -> None:
    """Adds the commands of `deltactl adapters`."""
    _add_readers(add)
    _add_changes(add)
    _add_moves(add)


def _add_readers(add: Add) -> None:
    _add_name(
        add(
            "get", "show all about one adapter", _one(lambda client, a: client.get(a.name, timeout=a.timeout))
        )
    )
    add("list", "list the adapters", list_adapters).add_argument("--filter", default="", help=_FILTER_HELP)
    watch = add(
        "watch", "print the adapters as they are, then every change, until interrupted", watch_adapters
    )
    watch.add_argument("--filter", default="", help=_FILTER_HELP)
    watch.add_argument(
        "--resume-token", default="", metavar="TOKEN", help="go on after the event with this token"
    )


def _add_changes(add: Add) -> None:
    register = _add_name(add("register", "make a PEFT folder known under a name", _one(_register)))
    register.add_argument(
        "source",
        type=kinds.source,
        help="a folder under a root that the server allows, hf://ORGANISATION/NAME@REVISION, https://..., "
        "or s3://...",
    )
    _add_load(register)
    _add_files(register)
    _add_no_wait(register)

    upload = _add_name(
        add("upload", "send a PEFT folder to the server and make it known under a name", _one(_upload))
    )
    upload.add_argument("folder", help="the folder, on this machine")
    upload.add_argument("--replace", action="store_true", help="give the files to the adapter of this name")
    upload.add_argument("--keep-previous", action="store_true", help="keep the old version for rollback")
    _add_load(upload)
    _add_etag(upload)
    _add_label(upload)
    _add_checks(upload)

    update = _add_name(add("update", "give an adapter new files or new labels", _one(_update)))
    update.add_argument("--source", type=kinds.source, help="where the new version is, as in register")
    update.add_argument("--no-labels", action="store_true", help="take all labels away")
    update.add_argument("--keep-previous", action="store_true", help="keep the old version for rollback")
    _add_etag(update)
    _add_files(update)
    _add_no_wait(update)

    delete = _add_name(add("delete", "forget an adapter", _one(_delete)))
    delete.add_argument(
        "--drain-timeout",
        type=kinds.seconds,
        metavar="SECONDS",
        help="how long streams under way may go on (default: the server's five minutes)",
    )
    delete.add_argument("--force", action="store_true", help="even though it is pinned")
    delete.add_argument("--allow-missing", action="store_true", help="a missing adapter is no error")
    delete.add_argument("--wait", action="store_true", help="until its last stream has ended")
    _add_etag(delete)
    _add_checks(delete)

    rollback = _add_name(add("rollback", "make an earlier version the current one again", _one(_rollback)))
    rollback.add_argument("--version", type=int, help="which (default: the one before the current one)")
    _add_etag(rollback)
    _add_checks(rollback)


def _add_moves(add: Add) -> None:
    for name, text, call in (
        ("load", "bring an adapter to a tier", _load),
        ("evict", "take an adapter out of a tier", _evict),
        ("pin", "bring an adapter to a tier and keep it there", _pin),
    ):
        parser = _add_name(add(name, text, _one(call)))
        parser.add_argument("--tier", choices=["device", "host"], default="device", help="default: device")
        _add_version(parser)
        if call is _evict:
            parser.add_argument("--when-idle", action="store_true", help="wait until nothing uses it")
        if call is _pin:
            _add_etag(parser)
        _add_no_wait(parser)
        _add_checks(parser)
    unpin = _add_name(add("unpin", "let a pinned adapter be evicted again", _one(_unpin)))
    unpin.add_argument("--tier", choices=["device", "host"], help="only from this tier (default: both)")
    _add_version(unpin)
    _add_etag(unpin)
    _add_checks(unpin)


def _add_name(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("name", help="the adapter")
    return parser


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--version", type=int, help="an earlier version that is kept (default: the current one)"
    )


def _add_no_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-wait", action="store_true", help="answer at once, with the operation that `operations` follows"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load", choices=["device", "host"], metavar="TIER", help="bring it to device or host at once"
    )


def _add_checks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--validate-only", action="store_true", help="check everything and change nothing")


def _add_etag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--etag", default="", help="refuse unless the adapter's etag is this")


def _add_label(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--label", type=kinds.label, action="append", metavar="KEY=VALUE", help="a label; may be given again"
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    _add_label(parser)
    parser.add_argument(
        "--expected-digest", default="", metavar="SHA256", help="refuse other files than these"
    )
    _add_checks(parser)


def _one(call: Callable[[AdapterClient, argparse.Namespace], Adapter]) -> Command:
    """The command that makes a call and shows the adapter it answers."""

    def command(arguments: argparse.Namespace) -> int:
        with connection.admin_client(arguments) as client:
            found = call(client, arguments)
        if arguments.json:
            show.print_json(show.as_json(found))
        else:
            tables.show_adapter(found)
        return 0

    return command


def _register(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.register(
        arguments.name,
        arguments.source,
        labels=dict(arguments.label or ()),
        load_tier=arguments.load,
        expected_digest=arguments.expected_digest,
        validate_only=arguments.validate_only,
        return_immediately=arguments.no_wait,
        timeout=arguments.timeout,
    )


def _upload(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.upload(
        arguments.name,
        arguments.folder,
        labels=dict(arguments.label or ()),
        replace=arguments.replace,
        etag=arguments.etag,
        keep_previous=arguments.keep_previous,
        load_tier=arguments.load,
        validate_only=arguments.validate_only,
        timeout=arguments.timeout,
    )


def _update(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    labels = {} if arguments.no_labels else arguments.label and dict(arguments.label)
    return client.update(
        arguments.name,
        source=arguments.source,
        labels=labels,
        etag=arguments.etag,
        expected_digest=arguments.expected_digest,
        validate_only=arguments.validate_only,
        keep_previous=arguments.keep_previous,
        return_immediately=arguments.no_wait,
        timeout=arguments.timeout,
    )


def _delete(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.delete(
        arguments.name,
        etag=arguments.etag,
        drain_timeout=arguments.drain_timeout,
        force=arguments.force,
        allow_missing=arguments.allow_missing,
        validate_only=arguments.validate_only,
        wait_until_gone=arguments.wait,
        timeout=arguments.timeout,
    )


def _rollback(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.rollback(
        arguments.name,
        arguments.version,
        etag=arguments.etag,
        validate_only=arguments.validate_only,
        timeout=arguments.timeout,
    )


def _load(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.load(
        arguments.name,
        arguments.tier,
        version=arguments.version,
        return_immediately=arguments.no_wait,
        validate_only=arguments.validate_only,
        timeout=arguments.timeout,
    )


def _evict(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.evict(
        arguments.name,
        arguments.tier,
        version=arguments.version,
        when_idle=arguments.when_idle,
        return_immediately=arguments.no_wait,
        validate_only=arguments.validate_only,
        timeout=arguments.timeout,
    )


def _pin(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.pin(
        arguments.name,
        arguments.tier,
        version=arguments.version,
        etag=arguments.etag,
        return_immediately=arguments.no_wait,
        validate_only=arguments.validate_only,
        timeout=arguments.timeout,
    )


def _unpin(client: AdapterClient, arguments: argparse.Namespace) -> Adapter:
    return client.unpin(
        arguments.name,
        arguments.tier,
        version=arguments.version,
        etag=arguments.etag,
        validate_only=arguments.validate_only,
        timeout=arguments.timeout,
    )


def list_adapters(arguments: argparse.Namespace) -> int:
    with connection.admin_client(arguments) as client:
        found = list(client.list(arguments.filter, timeout=arguments.timeout))
    if arguments.json:
        show.print_json([show.as_json(adapter) for adapter in found])
    else:
        tables.show_adapters(found)
    return 0


def watch_adapters(arguments: argparse.Namespace) -> int:
    with (
        connection.admin_client(arguments) as client,
        client.watch(
            arguments.filter, resume_token=arguments.resume_token, timeout=arguments.timeout
        ) as events,
    ):
        for event in events:
            if arguments.json:
                show.print_json(show.as_json(event))
            else:
                print(_line(event), flush=True)
    return 0


def _line(event: WatchAdaptersResponse) -> str:
    words = [
        show.moment(event.event_time),
        AdapterEventType.Name(event.type).removeprefix("ADAPTER_EVENT_TYPE_"),
    ]
    if event.HasField("adapter"):
        words += [event.adapter.name, f"version {event.version}", tables.state(event.adapter.state)]
    if event.left_filter:
        words.append("left the filter")
    if event.reason:
        words.append(f"({event.reason})")
    return show.printable("  ".join(filter(None, words)))
