"""`deltaplane`: serves a model and its adapters.

Nothing heavy is imported before the arguments are known to be good, so that help and errors are instant.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deltaplane_controlplane.ports import RANK_PAGE_ROWS, rank_pages
from deltaplane_server import cli_values as values
from deltaplane_server.config import EngineConfig, LogFormat, LoraModule, ServerConfig
from deltaplane_server.startup import StartupError, one_line

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; answers the exit code: 2 where the server cannot start as it was asked to."""
    arguments = argument_parser().parse_args(argv)
    if arguments.command == "version":
        return _version()
    try:
        return _serve(arguments)
    except StartupError as error:
        print(f"deltaplane serve: error: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE


def _version() -> int:
    from deltaplane_server.version import VERSION

    print(f"deltaplane {VERSION}")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    config = server_config(arguments)
    try:
        from deltaplane_server.app import run
    except ModuleNotFoundError as error:
        raise StartupError(
            f"the package {error.name!r} is not installed, and a server needs more than a client does: "
            "pip install 'deltaplane[server]'"
        ) from error
    return run(config)


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """Checks what no single option can tell, and makes the configuration. Errors: StartupError."""
    _check_ports(arguments)
    _check_adapters(arguments)
    _check_adapter_pages(arguments)
    _check_scheduling(arguments)
    name = arguments.served_model_name or _served_name(arguments.model)
    return ServerConfig(
        engine=_engine_config(arguments, name),
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        http_host=arguments.http_host,
        http_port=arguments.http_port,
        state=arguments.state or _default_state(name),
        upload_dir=arguments.upload_dir,
        lora_modules=tuple(arguments.lora_modules),
        adapter_roots=tuple(arguments.adapter_roots),
        adapter_sources=tuple(arguments.adapter_sources),
        fetch_timeout_s=arguments.fetch_timeout,
        max_watches=arguments.max_watches,
        drain_timeout_s=arguments.drain_timeout,
        tls_cert_file=arguments.tls_cert_file,
        tls_key_file=arguments.tls_key_file,
        tls_client_ca_file=arguments.tls_client_ca_file,
        admin_tls_client_ca_file=arguments.admin_tls_client_ca_file,
        api_token_file=arguments.api_token_file,
        admin_token_file=arguments.admin_token_file,
        allow_insecure_admin=arguments.allow_insecure_admin,
        ports_file=arguments.ports_file,
        log_format=LogFormat(arguments.log_format),
        log_level=arguments.log_level,
        log_prompts=arguments.log_prompts,
        vllm_metrics=arguments.vllm_metrics,
    )


def _engine_config(arguments: argparse.Namespace, name: str) -> EngineConfig:
    return EngineConfig(
        model=arguments.model,
        served_model_name=name,
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enable_chunked_prefill=arguments.enable_chunked_prefill,
        kv_cache_bytes=arguments.kv_cache_memory,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enable_prefix_caching=arguments.enable_prefix_caching,
        enable_lora=arguments.enable_lora,
        max_loras=arguments.max_loras,
        max_lora_rank=arguments.max_lora_rank,
        adapter_pages=arguments.adapter_pages,
        max_cpu_loras_bytes=arguments.lora_host_memory,
        max_cpu_loras=arguments.max_cpu_loras,
        max_waiting=arguments.max_waiting,
        seed=arguments.seed,
        num_threads=arguments.threads,
        enforce_eager=arguments.enforce_eager,
    )


def _served_name(model: str) -> str:
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _default_state(name: str) -> str:
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return str(Path(state_home) / "deltaplane" / (re.sub(r"[^A-Za-z0-9._-]", "_", name) + ".sqlite3"))


def _check_ports(arguments: argparse.Namespace) -> None:
    flags: dict[int, str] = {}
    for flag in ("--port", "--admin-port", "--http-port"):
        number = getattr(arguments, flag.strip("-").replace("-", "_"))
        if number and number in flags:
            raise StartupError(f"{flag} {number} is {flags[number]} too; give each a port of its own")
        flags[number] = flag


def _check_adapters(arguments: argparse.Namespace) -> None:
    modules: list[LoraModule] = arguments.lora_modules
    if modules and not arguments.enable_lora:
        raise StartupError("--lora-modules cannot be served with --no-enable-lora; leave one of them out")
    seen: dict[str, LoraModule] = {}
    for module in modules:
        if (other := seen.setdefault(module.name, module)) is not module:
            raise StartupError(
                f"--lora-modules names {module.name!r} twice ({other.source} and {module.source}); "
                "give each a name of its own"
            )


def _check_adapter_pages(arguments: argparse.Namespace) -> None:
    pages, rank = arguments.adapter_pages, arguments.max_lora_rank
    if pages is not None and pages < (needed := rank_pages(rank)):
        raise StartupError(
            f"--adapter-pages {pages} is below the {needed} that an adapter of --max-lora-rank {rank} takes; "
            "raise the former or lower the latter"
        )


def _check_scheduling(arguments: argparse.Namespace) -> None:
    budget, sequences = arguments.max_num_batched_tokens, arguments.max_num_seqs
    if budget < sequences:
        raise StartupError(
            f"--max-num-batched-tokens {budget} is below --max-num-seqs {sequences}, and each sequence needs "
            "one token of a step; raise the former or lower the latter"
        )


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage that hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


def argument_parser() -> argparse.ArgumentParser:
    """All of the command line."""
    parser = _OneLineParser(
        prog="deltaplane",
        description="Serves one base model and many LoRA adapters of it over gRPC.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{serve,version}")
    serve = commands.add_parser(
        "serve",
        help="serve a model and its adapters",
        description="Serves a model and its adapters: a data plane, a control plane and metrics.",
        usage="deltaplane serve MODEL [options]",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    _add_model(serve)
    _add_adapters(serve)
    _add_scheduling(serve)
    _add_network(serve)
    _add_access(serve)
    _add_logs(serve)
    commands.add_parser("version", help="print the version", description="Prints the version.")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="the folder of a Hugging Face model, or its id on the hub"
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call it (default: its folder or id)"
    )
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="number type; auto is float32 on a CPU, else the model's own",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument(
        "--max-model-len",
        type=values.positive,
        metavar="TOKENS",
        help="the most tokens of prompt and output together (default: what the model knows and memory holds)",
    )
    group.add_argument(
        "--seed", type=values.seed, metavar="N", help="makes requests that bring no seed repeatable"
    )
    group.add_argument(
        "--threads",
        type=values.positive,
        metavar="N",
        help="CPU threads of a step (default: all cores but one, which the event loop needs; beside a GPU 1)",
    )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--enable-lora", action=argparse.BooleanOptionalAction, default=True, help="serve adapters at all"
    )
    group.add_argument(
        "--lora-modules",
        type=values.lora_module,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=SOURCE",
        help="adapters to register at start: each a folder, or an address such as hf://org/name@revision",
    )
    group.add_argument(
        "--adapter-roots",
        type=values.existing_folder,
        nargs="+",
        action="extend",
        default=[],
        metavar="FOLDER",
        help="folders from which adapters may be registered while the server runs",
    )
    group.add_argument(
        "--adapter-sources",
        type=values.adapter_source,
        nargs="+",
        action="extend",
        default=[],
        metavar="PREFIX",
        help="remote places from which adapters may be registered while the server runs: hf:// or hf://org/, "
        "https://host/path/, s3://bucket/prefix/",
    )
    group.add_argument(
        "--fetch-timeout",
        type=values.positive_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="how long fetching an adapter from a remote place may take",
    )
    group.add_argument("--max-loras", type=values.positive, default=4, help="the most adapters in one step")
    group.add_argument("--max-lora-rank", type=values.lora_rank, default=16, help="the highest rank accepted")
    group.add_argument(
        "--adapter-pages",
        type=values.positive,
        metavar="N",
        help=f"rank pages on the device; an adapter takes one for each {RANK_PAGE_ROWS} of its rows: as many "
        "as its rank, one more with DoRA, and one more with biases (default: room for --max-loras adapters "
        "of --max-lora-rank with LoRA alone)",
    )
    host = group.add_mutually_exclusive_group()
    host.add_argument(
        "--max-cpu-loras",
        type=values.positive,
        metavar="N",
        help="host memory for adapters, as room for this many of the highest rank with LoRA alone",
    )
    host.add_argument(
        "--lora-host-memory",
        type=values.size,
        default=1 << 30,
        metavar="SIZE",
        help="host memory for adapters, in bytes or as 4GiB",
    )
    group.add_argument(
        "--state",
        metavar="FILE",
        help='SQLite file of the catalogue of adapters, or ":memory:" '
        "(default: deltaplane/<model>.sqlite3 in XDG_STATE_HOME)",
    )
    group.add_argument(
        "--upload-dir",
        type=Path,
        metavar="FOLDER",
        help="folder of this server's own for uploaded and fetched adapters; those that its catalogue does "
        "not name are removed from it (default: beside the catalogue, or a temporary one)",
    )


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling and memory")
    group.add_argument(
        "--max-num-seqs", type=values.positive, default=64, help="the most sequences in one step"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=values.positive, default=512, help="the most tokens in one step"
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute long prompts in pieces, beside the decodes",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="reuse the KV pages of equal prompt beginnings",
    )
    group.add_argument(
        "--max-waiting", type=values.count, default=1024, help="requests that may wait for a step"
    )
    group.add_argument(
        "--kv-cache-memory",
        type=values.size,
        metavar="SIZE",
        help="memory of KV pages, in bytes or as 4GiB (default: fitted to the device)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=values.share,
        default=0.9,
        metavar="SHARE",
        help="share of a GPU to take",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="do without CUDA graphs: a GPU starts sooner and decodes more slowly",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--host", default="0.0.0.0", help="address of the data plane")
    group.add_argument(
        "--port", type=values.port, default=50051, help="port of the data plane; 0 takes a free one"
    )
    group.add_argument("--admin-host", default="127.0.0.1", help="address of the control plane")
    group.add_argument("--admin-port", type=values.port, default=50052, help="port of the control plane")
    group.add_argument(
        "--max-watches",
        type=values.positive,
        default=1024,
        metavar="N",
        help="the most WatchAdapters streams of the control plane at once",
    )
    group.add_argument("--http-host", default="0.0.0.0", help="address of /metrics, /healthz and /readyz")
    group.add_argument(
        "--http-port", type=values.port, default=9400, help="port of /metrics, /healthz and /readyz"
    )
    group.add_argument(
        "--ports-file", type=Path, metavar="FILE", help="write the ports there as JSON when ready"
    )
    group.add_argument(
        "--drain-timeout",
        type=values.seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long running streams may go on after SIGTERM",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "access", "Files are in PEM, or hold one token a line; they are read again when they change."
    )
    for flag, text in (
        ("--tls-cert-file", "certificate of the server, and its chain: both planes speak TLS"),
        ("--tls-key-file", "private key of the certificate"),
        ("--tls-client-ca-file", "authorities: clients must show a certificate that one of them signed"),
        ("--admin-tls-client-ca-file", "the same for the control plane, in place of --tls-client-ca-file"),
        ("--api-token-file", "tokens: a call to the data plane must bring one"),
        ("--admin-token-file", "tokens: a call to the control plane must bring one"),
    ):
        group.add_argument(flag, type=Path, metavar="FILE", help=text)
    group.add_argument(
        "--allow-insecure-admin",
        action="store_true",
        help="let other machines reach a control plane that asks nobody who they are",
    )


def _add_logs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs and metrics")
    group.add_argument(
        "--log-format",
        choices=[f.value for f in LogFormat],
        default=LogFormat.CONSOLE.value,
        help="how logs look",
    )
    group.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="the least that is logged",
    )
    group.add_argument("--log-prompts", action="store_true", help="put prompts into the request log")
    group.add_argument(
        "--vllm-metrics", action="store_true", help="serve the vllm: metrics that gateways read too"
    )
