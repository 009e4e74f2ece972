"""The container files agree with the programs and folders that they name."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from deltaplane.cli.main import main as deltactl
from deltaplane_server import cli

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


def interpolated(text: str) -> str:
    """The text with the defaults of compose's variables: ${NAME:-default}, nested once."""
    for _ in range(2):
        text = re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text.replace("${HOME}", "/home/someone"))
    return text


@pytest.mark.parametrize("service", COMPOSE["services"].values(), ids=COMPOSE["services"])
def test_a_service_starts_the_server_with_options_that_it_has(
    service: dict[str, Any], tmp_path: Path
) -> None:
    roots = dict.fromkeys(("/models", "/adapters", "/var/lib/deltaplane"), tmp_path)
    words = [interpolated(word) for word in service["command"]]
    words = [re.sub("|".join(roots), str(tmp_path), word) for word in words]
    config = cli.server_config(cli.argument_parser().parse_args(["serve", *words]))
    assert config.adapter_roots
    published = {port.rpartition(":")[2] for port in service["ports"]}
    assert published == {str(config.port), str(config.http_port)}
    assert str(config.admin_port) not in published
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > config.drain_timeout_s


@pytest.mark.parametrize("service", COMPOSE["services"].values(), ids=COMPOSE["services"])
def test_a_service_has_its_volumes_and_its_build(service: dict[str, Any]) -> None:
    volumes = [interpolated(volume).split(":")[1] for volume in service["volumes"]]
    assert volumes == ["/models", "/adapters", "/var/lib/deltaplane"]
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert service["build"]["args"]["TORCH"] == service["image"].partition(":")[2]
    assert "state" in COMPOSE["volumes"]


def test_the_gpu_service_alone_reserves_a_gpu_and_is_not_started_by_default() -> None:
    services = COMPOSE["services"]
    (device,) = services["deltaplane-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert services["deltaplane-gpu"]["profiles"] == ["gpu"]
    assert "profiles" not in services["deltaplane"]
    assert "deploy" not in services["deltaplane"]


def test_the_health_checks_are_commands_of_deltactl(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [service["healthcheck"]["test"] for service in COMPOSE["services"].values()]
    checks += [["CMD", *re.findall(r'"([^"]+)"', re.search(r"HEALTHCHECK.*?(\[.*?\])", DOCKERFILE, re.S)[1])]]  # type: ignore[index]
    for kind, program, *words in checks:
        assert (kind, program) == ("CMD", "deltactl")
        assert deltactl([*words, "--address=127.0.0.1:1", "--admin-address=127.0.0.1:1"]) == 1
        assert "no answer from 127.0.0.1:1" in capsys.readouterr().err


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M) for word in line.split()[:-1]
    ]
    assert {"pyproject.toml", "server"} <= set(copied)
    for path in copied:
        assert (ROOT / path).exists()
        assert any(fnmatch(path, pattern) for pattern in allowed), f".dockerignore leaves {path} out"


def test_the_image_has_pinned_bases_and_an_ordinary_user() -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.M)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)) == {"${PYTHON_IMAGE}"}
    assert re.search(r"^USER deltaplane$", DOCKERFILE, re.M)
    assert DOCKERFILE.index("USER deltaplane") < DOCKERFILE.index("ENTRYPOINT")
