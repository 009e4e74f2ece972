"""The load generator: what it asks for, when, and what it makes of the answers."""

import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from bench import report, serve
from bench.load import Burst, Choice, ClosedLoop, Job, Lengths, Poisson, RequestMix
from bench.load_generator import LoadGenerator, Percentiles
from peft_factory import make_adapter, make_tiny_model
from serving import Served, served

NAMES = tuple("abcde")
SIXTEEN = Lengths(16, 16)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    model = make_tiny_model(folder, "llama")
    adapter = make_adapter(model, folder / "adapter")
    with served(
        model, folder, "--device", "cpu", "--max-num-seqs", "8", adapters={"one": adapter}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def generator(server: Served) -> Iterator[LoadGenerator]:
    with LoadGenerator(server.address, 2) as clients:
        yield clients


def _mix(output: int, *adapters: str, temperature: float = 0.0) -> RequestMix:
    return RequestMix(256, Lengths(4, 12), Lengths(output, output), adapters, temperature=temperature)


def test_all_of_a_burst_is_measured(generator: LoadGenerator, server: Served) -> None:
    before = server.metric("deltaplane_generation_tokens_total")
    result = generator.run(_mix(7, "", "one"), Burst(9))
    assert server.metric("deltaplane_generation_tokens_total") - before == 9 * 7
    assert result.errors == {}
    assert result.requests == 9
    assert result.tokens_per_s * result.seconds == pytest.approx(9 * 7)
    assert result.requests_per_s * result.seconds == pytest.approx(9)
    assert 0 < result.ttft.p50 <= result.ttft.p90 <= result.ttft.p99 <= result.seconds * 1e3
    assert 0 < result.itl.p50 <= result.itl.p99
    assert result.clients == 2
    assert 0 < result.busiest_client <= result.client_cpus


def test_streams_go_on_until_the_window_closes_and_then_stop(
    generator: LoadGenerator, server: Served
) -> None:
    result = generator.run(_mix(5, "one", temperature=1.0), ClosedLoop(3, warmup_s=0.1, seconds=1.0))
    assert result.errors == {}
    assert result.requests > 3
    assert result.seconds == 1.0
    assert result.tokens_per_s >= result.requests
    while server.metric("deltaplane_requests_running"):
        time.sleep(0.01)


def test_requests_arrive_however_many_are_under_way(generator: LoadGenerator) -> None:
    result = generator.run(_mix(3), Poisson(60.0, warmup_s=0.0, seconds=1.0))
    assert result.errors == {}
    assert 20 < result.requests < 120
    assert result.late.p50 >= 0


def test_streams_that_fail_are_counted_by_their_code(generator: LoadGenerator) -> None:
    result = generator.run(_mix(3, "nobody", "one"), Burst(4))
    assert result.errors == {"NOT_FOUND": 2}
    assert result.requests == 2
    assert math.isnan(generator.run(_mix(3, "nobody"), Burst(2)).ttft.p50)


def test_a_server_that_runs_can_be_loaded(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    options = ["--rate", "20", "--prompt", "4-8", "--output", "2", "--seconds", "0.5", "--warmup", "0"]
    result = serve.main(["--address", server.address, "--names", "one", "--clients", "1", *options])
    assert not result.errors
    assert result.requests > 0
    written = json.loads((tmp_path / "serve.json").read_text())
    assert written["workload"]["adapters"] == "1 adapters, zipf"
    assert written["results"]["requests"] == result.requests
    assert "20 requests a second, Poisson" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--names", "one"], ["--address", "x:1", "--", "--max-loras", "4"]])
def test_options_of_the_other_kind_of_server_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(words)


def test_the_same_numbers_draw_the_same_requests() -> None:
    mix = RequestMix(100, Lengths(1, 9), Lengths(1, 9), NAMES, Choice.UNIFORM)
    first, again, other = (list(islice(mix.requests(client, 2, seed=1), 20)) for client in (0, 0, 1))
    assert first == again != other
    assert all(1 <= len(request.prompt) <= 9 and 1 <= request.output <= 9 for request in first)
    assert all(0 <= token < 100 for request in first for token in request.prompt)


def test_clients_take_turns_over_the_adapters() -> None:
    mix = RequestMix(100, SIXTEEN, SIXTEEN, NAMES)
    asked = [[r.adapter for r in islice(mix.requests(client, 2, seed=0), 5)] for client in (0, 1)]
    assert sorted(asked[0] + asked[1]) == sorted(NAMES * 2)
    assert asked[0] == ["a", "c", "e", "b", "d"]
    assert next(RequestMix(100, SIXTEEN, SIXTEEN).requests(0, 1, seed=0)).adapter == ""


@pytest.mark.parametrize(
    ("choice", "shares"),
    [(Choice.UNIFORM, [0.2] * 5), (Choice.ZIPF, [60 / 137, 30 / 137, 20 / 137, 15 / 137, 12 / 137])],
)
def test_adapters_are_chosen_with_their_probabilities(choice: Choice, shares: list[float]) -> None:
    mix = RequestMix(2, Lengths(1, 1), SIXTEEN, NAMES, choice)
    asked = Counter(request.adapter for request in islice(mix.requests(0, 1, seed=0), 20_000))
    assert [asked[name] / 20_000 for name in NAMES] == pytest.approx(shares, abs=0.015)


def test_a_load_is_shared_by_all_clients() -> None:
    mix = RequestMix(2, SIXTEEN, SIXTEEN)
    for arrivals in (Burst(10), ClosedLoop(10, 0.0, 1.0)):
        assert [Job(mix, arrivals, client, 4, 0).share for client in range(4)] == [3, 3, 2, 2]


def test_lengths_are_a_number_or_a_range() -> None:
    assert Lengths.parse("128") == Lengths(128, 128)
    assert Lengths.parse("8-512") == Lengths(8, 512)
    assert {Lengths(2, 4).draw(random.Random(seed)) for seed in range(50)} == {2, 3, 4}
    for text in ("0", "9-8"):
        with pytest.raises(ValueError, match="is not a number of tokens such as 128 or 8-512"):
            Lengths.parse(text)


def test_percentiles_are_values_that_were_seen() -> None:
    assert Percentiles.of([0.001 * n for n in range(100, 0, -1)]) == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([0.5]) == Percentiles(500.0, 500.0, 500.0)


def test_a_client_that_dies_ends_the_benchmark(server: Served) -> None:
    with LoadGenerator(server.address, 1) as clients:
        clients.run(_mix(1), Burst(1))
        [process] = clients._processes
        assert process.pid is not None
        os.kill(process.pid, 9)
        with pytest.raises(SystemExit, match="a client process has died"):
            clients.run(_mix(1), Burst(1))
