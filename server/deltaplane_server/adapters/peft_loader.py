"""Reads adapters that PEFT saved: checks them once, and packs them when they are needed."""

import hashlib
import io
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_controlplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane_controlplane.ports import NO_LINKS, AdapterManifest, Links
from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_kernels.side_pages import side_page_layout
from deltaplane_server.adapters.adapter_plan import AdapterPlan, FileContents, contents_of, make_plan
from deltaplane_server.adapters.affine import Affine, BaseWeights, affine
from deltaplane_server.adapters.files import (
    CONFIG_FILE,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    WEIGHTS_FILE,
    AdapterFile,
    Digest,
    FileState,
    open_folder,
)
from deltaplane_server.adapters.host_pages import HostPages
from deltaplane_server.adapters.known_digests import KnownDigests
from deltaplane_server.adapters.load_threads import LoadThreads
from deltaplane_server.adapters.lora_matrices import AdaptedSlice
from deltaplane_server.adapters.packing import PackedAdapter, pack_pages, rows_of
from deltaplane_server.adapters.peft_config import MAX_CONFIG_BYTES, parse_config
from deltaplane_server.adapters.safetensors_header import TensorEntry, parse_header, read_header_bytes
from deltaplane_server.adapters.side_packing import ReadBytes, check_base_copies, check_tied, pack_side
from deltaplane_server.adapters.tensor_values import converted, tensor_of
from deltaplane_server.adapters.unservable import unservable
from deltaplane_server.adapters.value_check import check_values

_PLANS_KEPT = 32
"""Of a configuration and a header; as many headers, which several configurations share."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What was read of both files.

    weights: [n], uint8. states: see AdapterFile.state_if_unchanged. read_from: the clock when reading began.
    """

    config: bytes
    weights: Tensor
    states: Sequence[FileState | None]
    read_from: int


class PeftLoader:
    """Loads PEFT folders for one base: exactly as PEFT would apply them, or not at all.

    layout: the linears of the base that take a delta.
    max_lora_rank: a higher rank is refused, and so bounds what is read.
    dtype: of the rank pages.
    base: the weights that DoRA, trained biases and copies of the base's tables are relative to; without them
        such adapters are refused.
    host_pages: where they are packed; None takes new memory for each adapter.
    threads: help to read and pack; None takes some for this loader alone.
    sha256: makes the digest of an adapter. clock: ns since the epoch, as the ctime of files.

    The digest of an adapter is the SHA-256 of adapter_config.json followed by adapter_model.safetensors:

        cat adapter_config.json adapter_model.safetensors | sha256sum

    It is computed when an adapter is inspected, and when it is packed, unless its files are known to be as
    they were when this was last done: KnownDigests has the rule. So it is with the look at each value of
    plain LoRA; what DoRA and biases make of their values is looked at whenever they are packed.

    Loads run beside the thread that makes steps, so that what takes long lets go of the GIL: reading, the
    digest and the arithmetic. Reading and arithmetic are divided among the threads of LoadThreads. What holds
    the GIL, the checks of names and patterns, is done once for all adapters of the same configuration and
    header. No memory is taken for a load that the last one has left: each 4 KiB of new memory is a page
    fault.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        *,
        max_lora_rank: int,
        dtype: torch.dtype,
        base: BaseWeights | None = None,
        host_pages: HostPages | None = None,
        threads: LoadThreads | None = None,
        sha256: Callable[[], Digest] = hashlib.sha256,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._layout = layout
        self._page_layout = RankPageLayout(layout)
        self._side_layout = side_page_layout(layout)
        self._max_lora_rank = max_lora_rank
        self._dtype = dtype
        self._base = base
        self._host_pages = host_pages
        self._file_buffers = _Buffers()
        self._threads = threads or LoadThreads()
        self._sha256 = sha256
        self._known_digests = KnownDigests()
        self._clock = clock
        self._digests = ThreadPoolExecutor(thread_name_prefix="adapter-digest")
        self._contents = lru_cache(_PLANS_KEPT)(self._read_contents)
        self._plan = lru_cache(_PLANS_KEPT)(self._make_plan)

    def inspect(self, source: Path, links: Links = NO_LINKS) -> AdapterManifest:
        """Reads an adapter's files once and checks all there is to check, a few MB at a time in memory.

        links: that files may be read through.
        Errors: InvalidArgumentError, which names what cannot be served exactly.
        """
        read_from = self._clock()
        digest = self._sha256()
        with open_folder(source, links) as folder:
            with folder.open(CONFIG_FILE, digest) as file:
                config_bytes = _read_config(file)
                states = [file.state_if_unchanged()]
            with folder.open(WEIGHTS_FILE, digest) as file:
                plan = self._plan(config_bytes, read_header_bytes(file.read, file.size), file.size)
                check_values(file, plan.scales(), self._dtype)
                file.expect_end()
                self._check_equalities(plan, partial(_read_again, file, plan.header_bytes))
                states.append(file.state_if_unchanged())
        hexdigest = digest.hexdigest()
        self._known_digests.put(states, hexdigest, read_from, are_good=True)
        return AdapterManifest(
            source=str(source),
            digest=hexdigest,
            rank=plan.rank,
            alpha=plan.config.alpha,
            rslora=plan.config.rslora,
            target_modules=plan.target_modules(),
            num_layers=plan.num_layers,
            source_bytes=len(config_bytes) + file.size,
            host_bytes=plan.num_pages * self._page_layout.page_bytes(self._dtype),
            num_pages=plan.num_pages,
            base_model=plan.config.base_model,
            rank_pattern=plan.rank_pattern(),
            features=plan.features(),
        )

    def pack(self, manifest: AdapterManifest, links: Links = NO_LINKS) -> PackedAdapter:
        """Reads an adapter's files once, into memory, and packs them.

        links: that files may be read through.
        Errors: FailedPreconditionError where the files are gone, or are not those of the manifest;
        InvalidArgumentError where they cannot be served exactly.
        """
        started = time.perf_counter()
        with self._file_buffers.take(manifest.source_bytes) as buffer:
            files = self._read_files(manifest, links, buffer)
            read = time.perf_counter()
            digest = self._begin_digest(files)
            try:
                plan, pages = self._pack_weights(files)
            except InvalidArgumentError:
                if digest.result() == manifest.digest:
                    raise
            if digest.result() != manifest.digest:
                raise _changed(manifest)
            self._known_digests.put(files.states, manifest.digest, files.read_from, are_good=True)
        return PackedAdapter(
            pages=pages,
            rows=rows_of(plan.slices, self._page_layout),
            side=plan.side.shape,
            read_ms=(read - started) * 1e3,
            pack_ms=(time.perf_counter() - read) * 1e3,
        )

    def _pack_weights(self, files: _Files) -> tuple[AdapterPlan, Tensor]:
        weights = files.weights
        beginning = io.BytesIO(weights[: LENGTH_BYTES + MAX_HEADER_BYTES].numpy().data)
        plan = self._plan(files.config, read_header_bytes(beginning.read, len(weights)), len(weights))
        body = weights[plan.header_bytes :]
        affines = self._affines(plan, body)
        pages = self._new_pages(plan.num_pages)
        ranked = pages[: plan.num_rank_pages]
        are_finite = plan.is_plain and self._known_digests.are_good(files.states)
        pack_pages(
            plan.slices, affines, body, self._page_layout, ranked, self._threads, are_finite=are_finite
        )
        if self._side_layout is not None:
            pack_side(plan.side, body, self._side_layout, pages[plan.num_rank_pages :], self._threads)
        self._check_equalities(plan, lambda start, stop: body[start:stop])
        return plan, pages

    def _check_equalities(self, plan: AdapterPlan, read: ReadBytes) -> None:
        check_tied(plan.side, read)
        if plan.side.base_copies:
            check_base_copies(plan.side, read, self._base_weights())

    def _affines(self, plan: AdapterPlan, body: Tensor) -> dict[AdaptedSlice, Affine]:
        """Of the linears that are not plain. body: the bytes of the file after its header, uint8."""

        def read(entry: TensorEntry) -> Tensor:
            return converted(entry, tensor_of(entry, body[entry.start : entry.stop]), 1.0, torch.float32)

        return {one: affine(one, read, self._base_weights()) for one in plan.slices if not one.rows.is_plain}

    def _base_weights(self) -> BaseWeights:
        if self._base is None:
            raise unservable("the adapter is relative to the base's weights, which are not at hand here")
        return self._base

    def _read_files(self, manifest: AdapterManifest, links: Links, buffer: Tensor) -> _Files:
        """Both files, as many bytes as when the manifest was made; the weights are a part of the buffer
        [source_bytes], uint8."""
        read_from = self._clock()
        try:
            with open_folder(Path(manifest.source), links) as folder:
                with folder.open(CONFIG_FILE) as file:
                    config_bytes = _read_config(file)
                    states = [file.state_if_unchanged()]
                with folder.open(WEIGHTS_FILE) as file:
                    if len(config_bytes) + file.size != manifest.source_bytes:
                        raise _changed(manifest)
                    weights = buffer[: file.size]
                    file.read_in_pieces(weights.numpy().data, self._threads)
                    file.expect_end()
                    states.append(file.state_if_unchanged())
        except InvalidArgumentError as error:
            raise FailedPreconditionError(
                f"the adapter's files can no longer be read: {error.message}", reason="ADAPTER_FILES_GONE"
            ) from error
        return _Files(config_bytes, weights, states, read_from)

    def _begin_digest(self, files: _Files) -> Future[str]:
        known = self._known_digests.get(files.states)
        if known is None:
            return self._digests.submit(self._compute_digest, files)
        future: Future[str] = Future()
        future.set_result(known)
        return future

    def _compute_digest(self, files: _Files) -> str:
        digest = self._sha256()
        digest.update(files.config)
        digest.update(files.weights.numpy().data)
        self._known_digests.put(files.states, digest.hexdigest(), files.read_from)
        return digest.hexdigest()

    def _make_plan(self, config_bytes: bytes, header_bytes: bytes, file_bytes: int) -> AdapterPlan:
        config = parse_config(config_bytes)
        contents = self._contents(header_bytes, file_bytes)
        plan = make_plan(config, contents, self._layout, self._max_lora_rank)
        if not plan.is_plain:
            self._base_weights()
        return plan

    def _read_contents(self, header_bytes: bytes, file_bytes: int) -> FileContents:
        return contents_of(parse_header(header_bytes, file_bytes), self._layout)

    def _new_pages(self, num_pages: int) -> Tensor:
        if self._host_pages is None:
            return torch.empty(num_pages, self._page_layout.page_elements, dtype=self._dtype)
        return self._host_pages.take(num_pages)


class _Buffers:
    """Memory for files that are read whole, used again and again: one piece for each load at a time."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[Tensor]:
        """[num_bytes], uint8, of any content."""
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            buffer = torch.empty(0, dtype=torch.uint8)
        if len(buffer) < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            yield buffer[:num_bytes]
        finally:
            self._free.put(buffer)


def _read_config(file: AdapterFile) -> bytes:
    if file.size > MAX_CONFIG_BYTES:
        raise unservable(f"{file.name} has {file.size} bytes; at most {MAX_CONFIG_BYTES} are read")
    data = file.read(file.size)
    file.expect_end()
    return data


def _read_again(file: AdapterFile, header_bytes: int, start: int, stop: int) -> Tensor:
    """See ReadBytes; of a file that was read before."""
    data = torch.empty(stop - start, dtype=torch.uint8)
    file.read_again(data.numpy().data, header_bytes + start)
    return data


def _changed(manifest: AdapterManifest) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"files in {manifest.source} changed since registration; update the adapter",
        reason="ADAPTER_FILES_CHANGED",
    )
