"""A server as `deltaplane serve` runs it, whose model computes nothing: a step takes a given time.

    python -m bench.paced_server --step-ms 5.5 --ports-file FILE [--max-num-seqs N]

Its tokenizer is trained on the spot, and the tokens it draws are prose. When its first step comes, it prints
the id that the system knows its engine's thread by.
"""

import argparse
import threading
import time
from functools import cached_property
from hashlib import sha1
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deltaplane_controlplane.ports import NO_LINKS, AdapterManifest, HostAdapter, Links
from deltaplane_server.app import run
from deltaplane_server.backend import Backend, ModelFacts
from deltaplane_server.config import EngineConfig, ServerConfig
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.scheduling.plan import SampledToken, StepPlan
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from deltaplane_server.scheduling.sequence import Sequence

PROSE = Path(__file__).resolve().parents[1] / "README.md"
MAX_MODEL_LEN = 16_384
_LAUNCH_BYTES = bytes(8192)
"""hashlib lets go of the GIL for as long as it takes to hash more than 2047 bytes."""

VOCAB_SIZE = 4096
"""Tokens of README.md then have the lengths that a large vocabulary gives to prose."""


class PacedStep:
    """A step under way (engine.api.StepHandle)."""

    def __init__(self, tokens: list[SampledToken], ready_at: float) -> None:
        self._tokens = tokens
        self._ready_at = ready_at

    def result(self) -> list[SampledToken]:
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        return self._tokens


class PacedRunner:
    """An engine.api.Runner over a device that needs `step_s` seconds for any step, one after the other.

    Starting a step lets go of the GIL for a few microseconds `num_launches` times, as calls into a GPU's
    driver do; another thread that waits for the GIL can take it there.
    """

    max_steps_under_way = 2

    def __init__(self, step_s: float, num_launches: int, prose: list[int]) -> None:
        """prose: token ids to answer with."""
        self._step_s = step_s
        self._num_launches = num_launches
        self._prose = prose
        self._free_at = 0.0

    @cached_property
    def thread_id(self) -> int:
        """Of the thread that asks for it first, which is told on standard output."""
        thread_id = threading.get_native_id()
        print(thread_id, flush=True)
        return thread_id

    def submit(self, plan: StepPlan) -> PacedStep:
        assert self.thread_id == threading.get_native_id()
        for _ in range(self._num_launches):
            sha1(_LAUNCH_BYTES)
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
        return PacedStep(
            [self._sample(part.sequence) for part in plan.scheduled if part.samples], self._free_at
        )

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def _sample(self, sequence: Sequence) -> SampledToken:
        place = sequence.num_tokens + 37 * sequence.id
        return SampledToken(sequence, self._prose[place % len(self._prose)])


class NoAdapters:
    """An AdapterLoader and a DevicePool for a server of the base model alone."""

    num_slots = num_pages = 0
    page_bytes = 1

    def inspect(self, source: Path, links: Links = NO_LINKS) -> AdapterManifest:
        raise NotImplementedError

    def pack(self, manifest: AdapterManifest, links: Links = NO_LINKS) -> HostAdapter:
        raise NotImplementedError

    def copy_in(self, slot: int, pages: object, adapter: HostAdapter) -> None:
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        raise NotImplementedError


def paced_backend(config: EngineConfig, step_s: float, num_launches: int) -> Backend:
    """KV pages for as many sequences of any length as there are seats."""
    tokenizer = Tokenizer(_train_tokenizer())
    prose = tokenizer.encode(PROSE.read_text(), add_special_tokens=False)
    return Backend(
        facts=ModelFacts(
            architecture="none",
            dtype="none",
            device="none",
            vocab_size=VOCAB_SIZE,
            hidden_size=1,
            num_layers=1,
            eos_token_ids=frozenset(),
        ),
        tokenizer=tokenizer,
        runner=PacedRunner(step_s, num_launches, prose),
        loader=NoAdapters(),
        pool=NoAdapters(),
        scheduler=SchedulerConfig.of(
            config,
            max_model_len=MAX_MODEL_LEN,
            num_pages=(config.max_num_seqs + 2) * MAX_MODEL_LEN // config.page_size,
        ),
        memory={},
    )


def _train_tokenizer() -> Any:
    """A byte-level BPE as Llama 3, Qwen and SmolLM have one (a transformers.PreTrainedTokenizerFast)."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rust.train([str(PROSE)], trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=rust)


def engine_config(max_num_seqs: int) -> EngineConfig:
    return EngineConfig(
        model="paced",
        served_model_name="paced",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        enable_lora=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--launches", type=int, default=16)
    parser.add_argument("--ports-file", type=Path, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    args = parser.parse_args()
    config = ServerConfig(
        engine=engine_config(args.max_num_seqs),
        host="127.0.0.1",
        port=0,
        admin_port=0,
        http_host="127.0.0.1",
        http_port=0,
        ports_file=args.ports_file,
        drain_timeout_s=0.0,
        log_level="error",
    )
    run(config, lambda engine: paced_backend(engine, args.step_ms / 1000, args.launches))


if __name__ == "__main__":
    main()
