"""The command line: what it takes, and the one line that it says to bad input."""

import subprocess
import sys
from pathlib import Path

import pytest

from deltaplane_server import cli
from deltaplane_server.cli_values import size
from deltaplane_server.config import LogFormat, LoraModule, ServerConfig
from deltaplane_server.startup import StartupError


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def parse(*arguments: str) -> ServerConfig:
    return cli.server_config(cli.argument_parser().parse_args(["serve", *arguments]))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr for arguments that are refused with exit code 2."""
    try:
        code = cli.main(["serve", *arguments])
    except SystemExit as exit_:
        code = exit_.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    config = parse("org/model")
    assert config.engine.model == config.engine.served_model_name == "org/model"
    assert (config.port, config.admin_port, config.http_port) == (50051, 50052, 9400)
    assert config.admin_host == "127.0.0.1"
    assert config.state == "/state/deltaplane/org_model.sqlite3"
    assert config.upload_folder == Path("/state/deltaplane/org_model.sqlite3.uploads")
    assert config.engine.max_loras == 4
    assert config.log_format is LogFormat.CONSOLE
    assert not config.log_prompts


def test_files_of_access_reach_the_configuration() -> None:
    config = parse(
        "m", "--tls-cert-file", "cert", "--tls-key-file", "key", "--tls-client-ca-file", "ca",
        "--admin-tls-client-ca-file", "admin-ca", "--api-token-file", "api", "--admin-token-file", "admin",
    )  # fmt: skip
    assert (config.tls_cert_file, config.tls_key_file) == (Path("cert"), Path("key"))
    assert (config.tls_client_ca_file, config.admin_tls_client_ca_file) == (Path("ca"), Path("admin-ca"))
    assert (config.api_token_file, config.admin_token_file) == (Path("api"), Path("admin"))


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    assert parse(str(tmp_path)).engine.served_model_name == tmp_path.name


def test_flags_reach_the_configuration(adapter: Path) -> None:
    config = parse(
        "m", "--served-model-name", "base", "--lora-modules", f"a={adapter}", f"b={adapter}",
        "--lora-modules", f"c={adapter}", "--max-loras", "2", "--max-lora-rank", "64", "--state", ":memory:",
        "--no-enable-chunked-prefill", "--enable-prefix-caching", "--max-num-seqs", "8", "--max-waiting", "0",
        "--kv-cache-memory", "2GiB", "--drain-timeout", "1.5", "--log-format", "json", "--vllm-metrics",
        "--max-watches", "7", "--adapter-pages", "24", "--fetch-timeout", "90.5",
    )  # fmt: skip
    assert config.lora_modules == tuple(LoraModule(name, str(adapter)) for name in "abc")
    engine = config.engine
    assert (engine.served_model_name, engine.max_loras, engine.max_lora_rank) == ("base", 2, 64)
    assert engine.kv_cache_bytes == 2 << 30
    assert not engine.enable_chunked_prefill
    assert engine.enable_prefix_caching
    assert (engine.max_num_seqs, engine.max_waiting) == (8, 0)
    assert (config.state, config.drain_timeout_s) == (":memory:", 1.5)
    assert config.log_format is LogFormat.JSON
    assert config.vllm_metrics
    assert (config.max_watches, engine.adapter_pages, config.fetch_timeout_s) == (7, 24, 90.5)


def test_slots_have_pages_for_lora_alone_or_as_many_as_are_asked_for() -> None:
    ranks = ("--max-loras", "3", "--max-lora-rank", "17")
    assert parse("m", *ranks).engine.num_adapter_pages == 3 * 3
    assert parse("m", *ranks, "--adapter-pages", "3").engine.num_adapter_pages == 3


def test_remote_adapters_reach_the_configuration() -> None:
    config = parse(
        "m", "--lora-modules", "a=hf://org/name@main", "b=HTTPS://Host:443/b", "--adapter-sources", "hf://org/",
        "s3://models/team", "--adapter-sources", "http://127.0.0.1:8000/",
    )  # fmt: skip
    assert [module.source for module in config.lora_modules] == ["hf://org/name@main", "https://host/b/"]
    sources = [str(prefix) for prefix in config.adapter_sources]
    assert sources == ["hf://org", "s3://models/team", "http://127.0.0.1:8000/"]
    assert parse("m").adapter_sources == ()


def test_uploads_are_kept_as_long_as_the_catalogue_or_where_they_are_told() -> None:
    assert parse("m", "--state", ":memory:").upload_folder is None
    assert parse("m", "--state", "/s/c.db").upload_folder == Path("/s/c.db.uploads")
    for state in (":memory:", "/s/c.db"):
        assert parse("m", "--state", state, "--upload-dir", "/u").upload_folder == Path("/u")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("1024", 1024),
        ("512M", 512 << 20),
        ("512MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GB", 2_000_000_000),
        ("3 KiB", 3072),
        ("10B", 10),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "MODEL"),
        (("m", "--port", "65536"), "--port: 65536 is not a port from 0 to 65535"),
        (("m", "--port", "x"), "--port: 'x' is not a port"),
        (("m", "--port", "7000", "--http-port", "7000"), "--http-port 7000 is --port too"),
        (("m", "--max-lora-rank", "0"), "--max-lora-rank: 0 is not a rank from 1 to 512"),
        (("m", "--max-lora-rank", "513"), "512"),
        (("m", "--max-loras", "0"), "--max-loras"),
        (("m", "--adapter-pages", "0"), "--adapter-pages"),
        (
            ("m", "--adapter-pages", "2", "--max-lora-rank", "17"),
            "--adapter-pages 2 is below the 3 that an adapter of --max-lora-rank 17 takes",
        ),
        (("m", "--max-num-seqs", "-1"), "--max-num-seqs"),
        (("m", "--max-num-seqs", "600"), "--max-num-batched-tokens 512 is below --max-num-seqs 600"),
        (("m", "--kv-cache-memory", "lots"), "'lots' is not a size"),
        (("m", "--kv-cache-memory", "0"), "at least 1 byte"),
        (("m", "--gpu-memory-utilization", "1.5"), "1.5 is not a share"),
        (("m", "--gpu-memory-utilization", "nan"), "'nan' is not a number"),
        (("m", "--drain-timeout", "-1"), "below 0"),
        (("m", "--fetch-timeout", "0"), "0 is no time at all"),
        (("m", "--max-watches", "0"), "--max-watches"),
        (("m", "--dtype", "int3"), "--dtype"),
        (("m", "--lora-modules", "legal"), "'legal' is not name=path"),
        (("m", "--lora-modules", "=x"), "'=x' is not name=path"),
        (("m", "--lora-modules", "a b=x"), "'a b' must be 1 to 128 characters"),
        (("m", "--lora-modules", "a=/no/such/folder"), "there is no folder /no/such/folder"),
        (("m", "--lora-modules", f"a={__file__}"), "is a file; give its folder"),
        (("m", "--lora-modules", f"a={Path(__file__).parent}"), "holds no adapter_config.json"),
        (("m", "--adapter-roots", "/no/such/folder"), "there is no folder /no/such/folder"),
        (("m", "--lora-modules", "a=hf://org"), "no address of adapters: name a repository as hf://org/name"),
        (("m", "--lora-modules", "a=http://10.0.0.1/a"), "http:// is for this machine alone"),
        (("m", "--adapter-sources", "ftp://host/"), "adapters come from hf://, https:// and s3://"),
        (("m", "--adapter-sources", "https://"), "write https://host/path/"),
        (("m", "--adapter-sources", "http://host/"), "http:// is for this machine alone"),
        (("m", "--max-cpu-loras", "4", "--lora-host-memory", "1G"), "not allowed with"),
        (
            (
                "m",
                "--no-such-flag",
            ),
            "--no-such-flag",
        ),
    ],
)
def test_bad_arguments_get_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in refusal(capsys, *arguments)


def test_two_adapters_of_one_name_are_refused(capsys: pytest.CaptureFixture[str], adapter: Path) -> None:
    assert "names 'a' twice" in refusal(capsys, "m", "--lora-modules", f"a={adapter}", f"a={adapter}")


def test_adapters_need_lora(adapter: Path) -> None:
    with pytest.raises(StartupError, match="--no-enable-lora"):
        parse("m", "--no-enable-lora", "--lora-modules", f"a={adapter}")


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys; from deltaplane_server.cli import main\n"
        "assert main(['version']) == 0\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'grpc', 'numpy', 'structlog'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("deltaplane ")
    assert "--lora-modules" in done.stdout


def test_a_server_without_its_model_imports_no_torch() -> None:
    script = (
        "import sys, deltaplane_server.app\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_installation_of_the_client_alone_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltaplane_server.app", None)
    assert cli.main(["serve", "some/model"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "deltaplane[server]" in message
