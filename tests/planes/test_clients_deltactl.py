"""deltactl against a real gRPC server whose two services answer what a test tells them to."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from deltaplane.cli import show
from deltaplane.cli.main import main
from deltaplane.v1 import adapters_pb2, generation_pb2
from scripted_server import Script, reason, serving, status

Capture = pytest.CaptureFixture[str]

RESIDENT = adapters_pb2.Adapter(
    name="legal-brief",
    version=2,
    state=adapters_pb2.ADAPTER_STATE_RESIDENT,
    slot=1,
    rank=8,
    hits=4,
    device_bytes=3 << 20,
)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture(autouse=True)
def address(script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(script) as address:
        monkeypatch.setenv("DELTAPLANE_ADDRESS", address)
        monkeypatch.setenv("DELTAPLANE_ADMIN_ADDRESS", address)
        yield address


def delta(text: str, index: int = 0, *, last: bool = False) -> generation_pb2.GenerateResponse:
    message = generation_pb2.GenerateResponse(request_id="r", text=text, token_ids=[1], output_index=index)
    if last:
        message.finish.reason = generation_pb2.FINISH_REASON_LENGTH
        message.usage.CopyFrom(
            generation_pb2.Usage(completion_tokens=3, decode_ms=200, adapter="a", adapter_load_ms=12.5)
        )
    return message


def test_list_is_a_table(script: Script, capsys: Capture) -> None:
    script.answers = [
        [adapters_pb2.ListAdaptersResponse(adapters=[RESIDENT, adapters_pb2.Adapter(name="b")])]
    ]
    assert main(["adapters", "list", "--filter", "state=RESIDENT"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["name", "version", "state", "rank"]
    assert first.split()[:5] == ["legal-brief", "2", "RESIDENT", "8", "1"]
    assert "3.0 MiB" in first
    assert second.split()[0] == "b"
    assert script.seen == [adapters_pb2.ListAdaptersRequest(filter="state=RESIDENT")]


def test_json_has_every_field(script: Script, capsys: Capture) -> None:
    script.answers = [[RESIDENT]]
    assert main(["adapters", "get", "legal-brief", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["name"] == "legal-brief"
    assert answer["state"] == "ADAPTER_STATE_RESIDENT"
    assert answer["misses"] == "0"


def test_options_may_stand_before_the_command(script: Script, capsys: Capture) -> None:
    script.answers = [[adapters_pb2.ListSlotsResponse(slots=[adapters_pb2.Slot(slot=0)])]]
    assert main(["--json", "slots"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["slot"] == 0


def test_register_sends_all_and_makes_a_local_folder_absolute(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    script.answers = [[RESIDENT], [RESIDENT]]
    words = ["--label", "team=search", "--label", "stage=beta=2", "--load", "host", "--validate-only"]
    assert main(["adapters", "register", "a", "here", *words]) == 0
    assert main(["adapters", "register", "a", "elsewhere"]) == 0
    assert script.seen[0] == adapters_pb2.RegisterAdapterRequest(
        name="a",
        source=str(tmp_path / "here"),
        labels={"team": "search", "stage": "beta=2"},
        load_tier=adapters_pb2.ADAPTER_TIER_HOST,
        validate_only=True,
    )
    assert script.seen[1] == adapters_pb2.RegisterAdapterRequest(name="a", source="elsewhere")


@pytest.mark.parametrize(
    ("words", "request_sent"),
    [
        (["load", "a"], adapters_pb2.LoadAdapterRequest(name="a", tier=adapters_pb2.ADAPTER_TIER_DEVICE)),
        (
            ["evict", "a", "--tier", "host"],
            adapters_pb2.EvictAdapterRequest(name="a", tier=adapters_pb2.ADAPTER_TIER_HOST),
        ),
        (
            ["pin", "a", "--no-wait"],
            adapters_pb2.PinAdapterRequest(
                name="a", tier=adapters_pb2.ADAPTER_TIER_DEVICE, return_immediately=True
            ),
        ),
        (
            ["evict", "a", "--when-idle", "--no-wait", "--version", "2"],
            adapters_pb2.EvictAdapterRequest(
                name="a",
                tier=adapters_pb2.ADAPTER_TIER_DEVICE,
                when_idle=True,
                return_immediately=True,
                version=2,
            ),
        ),
        (["unpin", "a"], adapters_pb2.UnpinAdapterRequest(name="a")),
        (
            ["unpin", "a", "--tier", "host", "--etag", "7"],
            adapters_pb2.UnpinAdapterRequest(name="a", tier=adapters_pb2.ADAPTER_TIER_HOST, etag="7"),
        ),
        (["rollback", "a", "--version", "1"], adapters_pb2.RollbackAdapterRequest(name="a", version=1)),
        (["delete", "a", "--force"], adapters_pb2.DeleteAdapterRequest(name="a", force=True)),
        (
            ["delete", "a", "--wait", "--validate-only"],
            adapters_pb2.DeleteAdapterRequest(name="a", wait_until_gone=True, validate_only=True),
        ),
        (
            ["register", "a", "hf://o/n@main", "--no-wait"],
            adapters_pb2.RegisterAdapterRequest(name="a", source="hf://o/n@main", return_immediately=True),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_moves_send_their_request_and_show_the_adapter(
    script: Script, capsys: Capture, words: list[str], request_sent: object
) -> None:
    script.answers = [[RESIDENT]]
    assert main(["adapters", *words]) == 0
    assert script.seen == [request_sent]
    assert "legal-brief" in capsys.readouterr().out


def test_update_can_clear_labels_and_leaves_the_rest(script: Script) -> None:
    script.answers = [[RESIDENT], [RESIDENT]]
    main(["adapters", "update", "a", "--no-labels"])
    main(["adapters", "update", "a", "--source", "/b", "--keep-previous"])
    masks = [request.update_mask.paths for request in script.seen]  # type: ignore[attr-defined]
    assert masks == [["labels"], ["source"]]


def test_watch_prints_a_line_for_each_event(script: Script, capsys: Capture) -> None:
    event = adapters_pb2.WatchAdaptersResponse(
        type=adapters_pb2.ADAPTER_EVENT_TYPE_LOADED, adapter=RESIDENT, version=2, reason="asked for"
    )
    end = adapters_pb2.WatchAdaptersResponse(type=adapters_pb2.ADAPTER_EVENT_TYPE_SNAPSHOT_END)
    left = adapters_pb2.WatchAdaptersResponse(
        type=adapters_pb2.ADAPTER_EVENT_TYPE_EVICTED, adapter=RESIDENT, version=2, left_filter=True
    )
    script.answers = [[end, event, left]]
    assert main(["adapters", "watch"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert third.endswith("left the filter")
    assert first.split() == ["SNAPSHOT_END"]
    assert second.split() == ["LOADED", "legal-brief", "version", "2", "RESIDENT", "(asked", "for)"]


def test_slots_capacity_and_model_are_told(script: Script, capsys: Capture) -> None:
    slot = adapters_pb2.Slot(slot=1, adapter="a", version=1, rank=8, pages=[0], pinned=True)
    script.answers = [
        [adapters_pb2.ListSlotsResponse(slots=[adapters_pb2.Slot(slot=0), slot])],
        [
            adapters_pb2.Capacity(
                slots=4, free_slots=3, by_rank=[adapters_pb2.RankCapacity(rank=16, fit_free=7)]
            )
        ],
        [generation_pb2.Model(name="tiny", max_lora_rank=16)],
    ]
    assert main(["slots"]) == 0
    assert main(["capacity", "--rank", "16"]) == 0
    assert main(["model"]) == 0
    out = capsys.readouterr().out
    assert "(free)" in out
    assert "3 free, 0 available, of 4" in out
    assert "tiny" in out
    assert script.seen[1] == adapters_pb2.GetCapacityRequest(ranks=[16])


def test_health_asks_both_planes(address: str, capsys: Capture) -> None:
    assert main(["health"]) == 0
    with serving(Script(), healthy=False) as other:
        assert main(["health", "--admin-address", other]) == 1
        assert main(["health", "--admin-address", other, "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "not serving" in lines[-2]
    assert json.loads(lines[-1]) == {"data_plane": True, "control_plane": False}


def test_one_stream_is_plain_text(script: Script, capsys: Capture) -> None:
    script.answers = [[delta("Hello "), delta("world", last=True)]]
    assert main(["generate", "Hi", "--adapter", "a", "--max-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Hello world\n"
    (request,) = script.seen
    assert isinstance(request, generation_pb2.GenerateRequest)
    assert (request.adapter, request.text, request.stop.max_tokens) == ("a", "Hi", 5)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert not request.stop.HasField("ignore_eos")


def test_several_streams_are_blocks_in_a_pipe(script: Script, capsys: Capture) -> None:
    script.answers = [[delta("one", last=True)], [delta("two", last=True)], [delta("three", last=True)]]
    assert main(["generate", "Hi", "--base", "--adapter", "a", "--adapter", "b", "--stats"]) == 0
    out = capsys.readouterr().out
    titles = [line.split(" (")[0] for line in out.splitlines() if line.startswith("==")]
    assert titles == ["== base model", "== a", "== b"]
    assert all(word in out for word in ("one", "two", "three", "tokens/s", "12.5"))
    requests = [r for r in script.seen if isinstance(r, generation_pb2.GenerateRequest)]
    assert sorted(request.adapter for request in requests) == ["", "a", "b"]


def test_json_lines_name_the_adapter(script: Script, capsys: Capture) -> None:
    script.answers = [[delta("one"), delta("two", last=True)]]
    assert main(["generate", "Hi", "--adapter", "a", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["adapter"], line["text"]) for line in lines] == [("a", "one"), ("a", "two")]


def test_adapters_are_added_up(script: Script, capsys: Capture) -> None:
    script.answers = [[delta("one", last=True)], [delta("two", last=True)], [delta("three", last=True)]]
    sums = ["a:0.75+b:-2", "b:0.5", "a+b"]
    assert main(["generate", "Hi", *(f"--adapter={who}" for who in sums)]) == 0
    out = capsys.readouterr().out
    assert [line.split(" (")[0] for line in out.splitlines() if line.startswith("==")] == [
        f"== {who}" for who in sums
    ]
    requests = [r for r in script.seen if isinstance(r, generation_pb2.GenerateRequest)]
    assert not any(request.adapter for request in requests)
    assert sorted([(t.adapter, t.weight) for t in request.adapters] for request in requests) == [
        [("a", 0.75), ("b", -2)],
        [("a", 1), ("b", 1)],
        [("b", 0.5)],
    ]


def test_several_outputs_have_a_block_each(script: Script, capsys: Capture) -> None:
    script.answers = [[delta("one"), delta("two", 1, last=True)]]
    assert main(["generate", "Hi", "--n", "2"]) == 0
    out = capsys.readouterr().out
    assert out.index("== base model 0") < out.index("one") < out.index("== base model 1") < out.index("two")


def test_a_chat_and_standard_input(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("Hi there")
    with (tmp_path / "prompt").open() as prompt:
        monkeypatch.setattr(sys, "stdin", prompt)
        script.answers = [[delta("x")]]
        assert main(["generate", "-", "--system", "Be brief."]) == 0
    (request,) = script.seen
    assert isinstance(request, generation_pb2.GenerateRequest)
    assert [(m.role, m.content) for m in request.messages.messages] == [
        ("system", "Be brief."),
        ("user", "Hi there"),
    ]


def test_one_failing_stream_leaves_the_others(script: Script, capsys: Capture) -> None:
    gone = status(grpc.StatusCode.NOT_FOUND, "no adapter 'b'", reason("ADAPTER_NOT_FOUND"))
    script.answers = [[delta("fine", last=True)], [gone]]
    assert main(["generate", "Hi", "--adapter", "a", "--adapter", "b"]) == 1
    captured = capsys.readouterr()
    assert "fine" in captured.out
    assert captured.err.splitlines() in (
        ["deltactl: error: a: no adapter 'b'"],
        ["deltactl: error: b: no adapter 'b'"],
    )


def test_errors_are_one_line_and_exit_code_1(script: Script, capsys: Capture) -> None:
    violation = error_details_pb2.BadRequest(field_violations=[{"field": "name", "description": "bad"}])
    script.answers = [
        [
            status(
                grpc.StatusCode.INVALID_ARGUMENT, "name: bad\nand long", reason("INVALID_ARGUMENT"), violation
            )
        ]
    ]
    assert main(["adapters", "get", "a"]) == 1
    assert capsys.readouterr().err == "deltactl: error: name: bad and long\n"
    assert main(["slots", "--admin-address", "127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deltactl: error: no answer from 127.0.0.1:1: ")
    assert line.endswith("--address and --admin-address name others)")
    assert main(["generate", "Hi", "--top-k", "-1"]) == 1
    assert "sampling.top_k: -1 is not a whole number from 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["slots", "--address", "localhost"], "'localhost' is no address; give HOST:PORT"),
        (["slots", "--timeout", "soon"], "'soon' is no number of seconds"),
        (["generate", "Hi", "--adapter", "a:much+b"], "'a:much+b' is no adapter, nor several to add up"),
        (["generate", "Hi", "--adapter", "a+a:2"], "'a+a:2' is no adapter"),
        (["generate", "Hi", "--adapter", "a+"], "'a+' is no adapter"),
        (["generate", "Hi", "--adapter", "a:inf"], "'a:inf' is no adapter"),
        (["adapters", "register", "a", "b", "--label", "x"], "'x' is no label; give KEY=VALUE"),
        (["adapters", "load", "a", "--tier", "gpu"], "invalid choice: 'gpu'"),
        (["generate"], "the following arguments are required: PROMPT"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(words: list[str], told: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert line.startswith("deltactl")


def test_a_bad_address_in_the_environment_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("DELTAPLANE_ADDRESS", "nowhere")
    with pytest.raises(SystemExit, match="2"):
        main(["slots"])
    assert "'nowhere' is no address" in capsys.readouterr().err


def test_model_output_cannot_steer_a_terminal() -> None:
    assert show.printable("a\x1b[31mb\r\n\tc\x9b") == "a�[31mb�\n\tc�"


def start(*words: str, **options: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "deltaplane.cli", *words], **options)  # type: ignore[call-overload, no-any-return]


def test_ctrl_c_ends_a_stream_with_130_and_no_traceback(script: Script) -> None:
    script.answers = [[delta("one "), None]]
    process = start("generate", "Hi", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"one "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"\n", b"")
    assert script.cancelled.wait(30)


def test_a_closed_pipe_is_no_traceback(script: Script) -> None:
    adapters = [adapters_pb2.Adapter(name=f"a{i}", source="x" * 500) for i in range(1000)]
    script.answers = [[adapters_pb2.ListAdaptersResponse(adapters=adapters)]]
    process = start("adapters", "list", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(30) == 1
    process.stderr.close()


def test_several_streams_are_columns_on_a_terminal(script: Script) -> None:
    script.answers = [[delta("one "), delta("more", last=True)], [delta("two "), delta("end", last=True)]]
    screen, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = start(
        "generate",
        "Hi",
        "--adapter",
        "a",
        "--adapter",
        "b",
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    seen = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if select.select([screen], [], [], 0.1)[0]:
            try:
                seen += os.read(screen, 65536)
            except OSError:  # the terminal's other end is closed
                break
    assert process.wait(30) == 0
    os.close(screen)
    last = [line for line in seen.decode().splitlines() if "more" in line or "end" in line][-1]
    assert last.count("│") == 4
    assert "one more" in last
    assert "two end" in last
