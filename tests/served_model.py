"""A tiny model as the server runs it on a CPU, step by step: the real loader, pool, decoder and runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.config import EngineConfig
from deltaplane_server.execution.setup import set_up
from deltaplane_server.models.config import load_decoder_config
from deltaplane_server.models.weights import Checkpoint
from deltaplane_server.scheduling.plan import NO_SLOT, ScheduledSequence, StepPlan
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence

MAX_RANK = 32
SLOTS = 4
PAGE = 16


@dataclass(frozen=True)
class Request:
    """A prompt for the base model (None), or for the adapter in a folder."""

    adapter: Path | None
    prompt: Sequence[int]


@dataclass(frozen=True)
class Reply:
    """Greedy tokens, and the log-probabilities [tokens, vocabulary] that they were chosen by."""

    tokens: list[int]
    logprobs: Tensor


class ServedModel:
    """manifests: what the loader said of each adapter of the last batch."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = EngineConfig(
            str(folder),
            "tiny",
            max_loras=SLOTS,
            max_lora_rank=MAX_RANK,
            adapter_pages=SLOTS * (MAX_RANK // 8 + 8),
            max_num_seqs=16,
            page_size=PAGE,
            kv_cache_bytes=16 << 20,
        )
        model = load_decoder_config(folder)
        execution = set_up(config, model, Checkpoint.open(folder), dtype, torch.device("cpu"))
        self._runner, self._pool = execution.runner, execution.pool
        self._vocab_size = model.vocab_size
        self._loader = PeftLoader(
            model.adapter_layout(), max_lora_rank=MAX_RANK, dtype=dtype, base=execution.base
        )
        self._ids = count(1)
        self.manifests: dict[Path, AdapterManifest] = {}

    def greedy(self, requests: Sequence[Request], num_tokens: int) -> list[Reply]:
        """Answers all at once: their prompts are one step, and so are their tokens, one after the other."""
        slots = self._load({request.adapter for request in requests if request.adapter is not None})
        pages = count()
        sequences = []
        for request in requests:
            length = len(request.prompt)
            own = [next(pages) for _ in range(-(-(length + num_tokens) // PAGE))]
            params = SamplingParams(temperature=0.0, logprobs=self._vocab_size)
            number = next(self._ids)
            sequences.append(
                TokenSequence(
                    number, f"r{number}", 0, list(request.prompt), length, params, StopParams(1000), pages=own
                )
            )
        rows = [self._step(requests, sequences, slots) for _ in range(num_tokens)]
        for sequence in sequences:
            self._runner.forget(sequence)
        for slot in slots.values():
            self._pool.clear(slot)
        self._pool.check_integrity()
        return [
            Reply(sequence.output_tokens, torch.stack([step[number] for step in rows]))
            for number, sequence in enumerate(sequences)
        ]

    def _load(self, adapters: set[Path]) -> dict[Path, int]:
        """Binds each adapter to a slot."""
        self.manifests = {}
        slots = {}
        first_page = 0
        for slot, adapter in enumerate(sorted(adapters)):
            manifest = self.manifests[adapter] = self._loader.inspect(adapter)
            packed = self._loader.pack(manifest)
            assert packed.nbytes == manifest.host_bytes
            pages = range(first_page, first_page + manifest.num_pages)
            self._pool.copy_in(slot, pages, packed)
            slots[adapter] = slot
            first_page = pages.stop
        return slots

    def _step(
        self, requests: Sequence[Request], sequences: Sequence[TokenSequence], slots: dict[Path, int]
    ) -> list[Tensor]:
        """Computes what each sequence lacks, and appends its next token. Answers the log-probabilities."""
        scheduled = []
        for request, sequence in zip(requests, sequences, strict=True):
            slot = NO_SLOT if request.adapter is None else slots[request.adapter]
            start = sequence.num_computed
            scheduled.append(
                ScheduledSequence(sequence, start, sequence.num_tokens - start, slot, samples=True)
            )
        num_decodes = sum(part.num_tokens == 1 for part in scheduled)
        scheduled.sort(key=lambda part: part.num_tokens > 1)
        rows = {}
        for token in self._runner.submit(StepPlan(scheduled, num_decodes)).result():
            row = rows[token.sequence.id] = torch.empty(self._vocab_size)
            ids, values = zip(*token.top, strict=True)
            row[list(ids)] = torch.tensor(values)
            token.sequence.num_computed = token.sequence.num_tokens
            token.sequence.tokens.append(token.token_id)
        return [rows[sequence.id] for sequence in sequences]
