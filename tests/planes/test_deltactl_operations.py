"""deltactl follows operations of a real control plane."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from admin_server import serving_admin
from control_plane import ControlPlane, eventually
from deltaplane.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest_asyncio.fixture(autouse=True)
async def address(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    async with serving_admin(plane, tmp_path) as address:
        monkeypatch.setenv("DELTAPLANE_ADMIN_ADDRESS", address)
        yield address


async def deltactl(*words: str) -> int:
    return await asyncio.to_thread(main, words)


async def begun(plane: ControlPlane, capsys: Capture) -> str:
    """Registers "far", whose files are on their way, and answers the operation."""
    plane.fetcher.gate.clear()
    capsys.readouterr()
    assert await deltactl("adapters", "register", "far", "fake://x", "--no-wait", "--json") == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["name"], answer["state"]) == ("far", "ADAPTER_STATE_FETCHING")
    await asyncio.to_thread(eventually, lambda: plane.fetcher.fetches == 1)
    return str(answer["operation"])


async def test_get_list_and_wait(plane: ControlPlane, capsys: Capture) -> None:
    operation = await begun(plane, capsys)
    assert await deltactl("operations", "get", operation) == 0
    shown = capsys.readouterr().out
    assert "fetch 50 B of 100 B" in shown
    assert "RUNNING" in shown
    assert await deltactl("operations", "list", "--filter", "done=false") == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["operation", "call", "adapter", "state"]
    assert row.split()[:4] == [operation, "register", "far", "RUNNING"]
    plane.fetcher.gate.set()
    assert await deltactl("operations", "wait", operation) == 0
    assert "fake://x@1" in capsys.readouterr().out
    assert await deltactl("operations", "get", operation) == 0
    shown = capsys.readouterr().out
    assert "SUCCEEDED" in shown
    assert "fake://x@1" in shown
    assert await deltactl("operations", "list", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["adapter_result"]["name"] == "far"


async def test_cancel(plane: ControlPlane, capsys: Capture) -> None:
    operation = await begun(plane, capsys)
    assert await deltactl("operations", "cancel", operation) == 0
    assert "CANCELL" in capsys.readouterr().out
    assert await deltactl("operations", "wait", operation) == 1
    assert "was cancelled" in capsys.readouterr().err
    assert await deltactl("operations", "get", "nobody") == 1
    assert "there is no operation 'nobody'" in capsys.readouterr().err


async def test_a_wait_that_takes_too_long(plane: ControlPlane, capsys: Capture) -> None:
    operation = await begun(plane, capsys)
    assert await deltactl("operations", "wait", operation, "--timeout", "0.1") == 1
    assert "is still under way after 0.1 s" in capsys.readouterr().err


async def test_adapters_show_pins_tiers_and_evictions(plane: ControlPlane, capsys: Capture) -> None:
    plane.add("a")
    plane.manager.pin("a", version=None)
    plane.manager.pin("a", plane.manager.get("a").tiers[0])
    capsys.readouterr()
    assert await deltactl("adapters", "get", "a") == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (facts["in"], facts["pinned"]) == ("host device", "host device")
    assert await deltactl("adapters", "unpin", "a", "--tier", "device") == 0
    capsys.readouterr()
    assert await deltactl("adapters", "evict", "a") == 0
    shown = capsys.readouterr().out
    assert "from device at " in shown
    assert "by an administrator" in shown
    assert await deltactl("capacity", "--rank", "8") == 0
    shown = capsys.readouterr().out
    assert "0 of 1 slots, 0 rank pages" in shown
    assert "may be pinned" in shown
