"""Reads adapters that PEFT saved: checks them once, and packs them when they are needed."""

import hashlib
import io
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_controlplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.rank_pages import RankPageLayout, rank_pages
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE, AdapterFile, open_folder
from deltaplane_server.adapters.lora_matrices import LoraMatrices, find_matrices
from deltaplane_server.adapters.packing import PackedAdapter, converted, pack_pages, ranks_of, tensor_of
from deltaplane_server.adapters.peft_config import MAX_CONFIG_BYTES, PeftLoraConfig, parse_config
from deltaplane_server.adapters.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    read_header,
)
from deltaplane_server.adapters.unservable import unservable


class PeftLoader:
    """Loads PEFT folders for one base: exactly as PEFT would apply them, or not at all.

    layout: the linears of the base that take a delta.
    max_lora_rank: a higher rank is refused, and so bounds what is read.
    dtype: of the rank pages. pin_memory: for pages that are copied to a CUDA device.

    The digest of an adapter is the SHA-256 of adapter_config.json followed by adapter_model.safetensors:

        cat adapter_config.json adapter_model.safetensors | sha256sum
    """

    def __init__(
        self,
        layout: AdapterLayout,
        *,
        max_lora_rank: int,
        dtype: torch.dtype,
        pin_memory: bool = False,
    ) -> None:
        self._layout = layout
        self._page_layout = RankPageLayout(layout)
        self._max_lora_rank = max_lora_rank
        self._dtype = dtype
        self._pin_memory = pin_memory

    def inspect(self, source: Path) -> AdapterManifest:
        """Reads an adapter's files once and checks all there is to check, one tensor at a time in memory.

        Errors: InvalidArgumentError, which names what cannot be served exactly.
        """
        digest = hashlib.sha256()
        with open_folder(source) as folder:
            with folder.open(CONFIG_FILE, digest) as file:
                config_bytes = _read_config(file)
            config = parse_config(config_bytes)
            with folder.open(WEIGHTS_FILE, digest) as file:
                header = read_header(file.read, file.size)
                matrices = self._find_matrices(header, config)
                self._check_values(file, matrices)
                file.expect_end()
        rank = max(one.rank for one in matrices)
        return AdapterManifest(
            source=str(source),
            digest=digest.hexdigest(),
            rank=rank,
            alpha=config.alpha,
            rslora=config.rslora,
            target_modules=tuple(dict.fromkeys(_kind(one.module) for one in matrices)),
            num_layers=len({one.layer for one in matrices}),
            source_bytes=len(config_bytes) + file.size,
            host_bytes=rank_pages(rank) * self._page_layout.page_bytes(self._dtype),
            base_model=config.base_model,
            rank_pattern=_rank_pattern(matrices, rank),
        )

    def pack(self, manifest: AdapterManifest) -> PackedAdapter:
        """Reads an adapter's files once, into memory, and packs them.

        Errors: FailedPreconditionError where the files are gone, or are not those of the manifest;
        InvalidArgumentError where they cannot be served exactly.
        """
        started = time.perf_counter()
        config_bytes, weights = _read_unchanged(manifest)
        read = time.perf_counter()
        beginning = io.BytesIO(weights[: LENGTH_BYTES + MAX_HEADER_BYTES].numpy().tobytes())
        header = read_header(beginning.read, len(weights))
        matrices = self._find_matrices(header, parse_config(config_bytes))
        body = weights[header.num_bytes :]
        pages = pack_pages(matrices, body, self._page_layout, self._dtype, pin_memory=self._pin_memory)
        return PackedAdapter(
            pages=pages,
            ranks=ranks_of(matrices, self._page_layout),
            read_ms=(read - started) * 1e3,
            pack_ms=(time.perf_counter() - read) * 1e3,
        )

    def _find_matrices(self, header: SafetensorsHeader, config: PeftLoraConfig) -> list[LoraMatrices]:
        return find_matrices(header.entries, config, self._layout, self._max_lora_rank)

    def _check_values(self, file: AdapterFile, matrices: Sequence[LoraMatrices]) -> None:
        """Reads the tensors, which is the rest of the file, and checks that pack can convert them."""
        scales = {one.a: 1.0 for one in matrices} | {one.b: one.scale for one in matrices}
        buffer = torch.empty(max(entry.nbytes for entry in scales), dtype=torch.uint8)
        view = buffer.numpy().data
        for entry in sorted(scales, key=lambda entry: entry.start):
            file.read_into(view[: entry.nbytes])
            converted(entry, tensor_of(entry, buffer[: entry.nbytes]), scales[entry], self._dtype)


def _read_config(file: AdapterFile) -> bytes:
    if file.size > MAX_CONFIG_BYTES:
        raise unservable(f"{file.name} has {file.size} bytes; at most {MAX_CONFIG_BYTES} are read")
    data = file.read(file.size)
    file.expect_end()
    return data


def _read_unchanged(manifest: AdapterManifest) -> tuple[bytes, Tensor]:
    """The bytes of config and weights, which must be those that the manifest was made from."""
    digest = hashlib.sha256()
    try:
        with open_folder(Path(manifest.source)) as folder:
            with folder.open(CONFIG_FILE, digest) as file:
                config_bytes = _read_config(file)
            with folder.open(WEIGHTS_FILE, digest) as file:
                if len(config_bytes) + file.size != manifest.source_bytes:
                    raise _changed(manifest)
                weights = torch.empty(file.size, dtype=torch.uint8)
                file.read_into(weights.numpy().data)
                file.expect_end()
    except InvalidArgumentError as error:
        raise FailedPreconditionError(
            f"the adapter's files can no longer be read: {error.message}", reason="ADAPTER_FILES_GONE"
        ) from error
    if digest.hexdigest() != manifest.digest:
        raise _changed(manifest)
    return config_bytes, weights


def _changed(manifest: AdapterManifest) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"files in {manifest.source} changed since registration; update the adapter",
        reason="ADAPTER_FILES_CHANGED",
    )


def _kind(module: str) -> str:
    return module.rpartition(".")[2]


def _rank_pattern(matrices: Sequence[LoraMatrices], rank: int) -> dict[str, int]:
    """Ranks other than `rank`: by kind of module ("q_proj") where all its layers agree, else by path."""
    by_kind: dict[str, set[int]] = defaultdict(set)
    for one in matrices:
        by_kind[_kind(one.module)].add(one.rank)
    pattern = {}
    for one in matrices:
        if one.rank != rank:
            kind = _kind(one.module)
            pattern[kind if len(by_kind[kind]) == 1 else f"layers.{one.layer}.{one.module}"] = one.rank
    return pattern
