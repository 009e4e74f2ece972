"""The tensors of a Hugging Face folder, read from its safetensors files."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.models.upload import TensorBytes, Upload

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; it is computed from the config."""
_NAMES_SHOWN = 8
_LENGTH_BYTES = 8
"""Of the number at the start of a safetensors file: the length of its header, which is JSON."""

log = structlog.get_logger(__name__)


class WeightSource(Protocol):
    """Where a decoder's weights come from: the tensors of a model by their Hugging Face names.

    dtype: of most weights.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def __contains__(self, name: str) -> bool: ...

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a tensor has at its source."""
        ...

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()) -> None:
        """That the source has the expected tensors in their shapes, and no others but the optional ones.

        Errors: InvalidArgumentError.
        """
        ...

    def read_rows(self, *names: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensors below each other, as one tensor of `dtype` on `device`.

        On a GPU it is being filled when this returns, and whole after finish(): until then kernels may be
        compiled and captured with it, but what they compute means nothing.
        """
        ...

    def finish(self) -> None:
        """Returns when all that was read is whole. Errors: InvalidArgumentError where it cannot be read."""
        ...


class Checkpoint:
    """Where each tensor of a checkpoint is, and what it looks like. Holds no weight.

    tensors: name to place, shape and dtype.
    """

    def __init__(self, tensors: Mapping[str, TensorBytes]) -> None:
        self.tensors = tensors
        self._upload: Upload | None = None

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the headers of model.safetensors, or of the shards that model.safetensors.index.json names.

        Errors: InvalidArgumentError, which names the file that is missing or broken, or the tensor whose
        dtype is not float32, bfloat16 or float16.
        """
        files = _files(folder)
        tensors: dict[str, TensorBytes] = {}
        for file, wanted in files.items():
            tensors |= _read_header(file, wanted)
        if not tensors:
            raise InvalidArgumentError(
                f"The safetensors files in {folder} hold no tensor; fetch the model again"
            )
        return cls(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights."""
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += math.prod(info.shape)
        return sizes.most_common(1)[0][0]

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor in its file."""
        return self.tensors[name].dtype

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()) -> None:
        """That the checkpoint has the expected tensors in their shapes, and no others but the optional ones.

        Errors: InvalidArgumentError, which names what is missing, unexpected or of another shape.
        """
        present = self.tensors.keys()
        problems = {
            "missing": [name for name in expected if name not in present],
            "unexpected": sorted(present - expected.keys() - set(optional)),
            "of another shape": [
                f"{name} {list(self.tensors[name].shape)}, the config says {list(shape)}"
                for name, shape in expected.items()
                if name in present and self.tensors[name].shape != shape
            ],
        }
        found = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
        if found:
            raise InvalidArgumentError(f"The weights do not fit config.json. Tensors {'; '.join(found)}")

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, in the checkpoint's dtype: a view of the file that is unmapped with it."""
        path = self.tensors[name].file
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise InvalidArgumentError(f"{path} cannot be read: {error}") from error

    def read_rows(self, *names: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensors below each other, as one tensor of `dtype` on `device`; on a GPU see finish().

        Errors: InvalidArgumentError where a file cannot be read.
        """
        sources = [self.tensors[name] for name in names]
        heights = [source.shape[0] for source in sources]
        rows = torch.empty(sum(heights), *sources[0].shape[1:], dtype=dtype, device=device)
        parts = torch.split(rows, heights)
        if device.type == "cpu":
            for part, name in zip(parts, names, strict=True):
                part.copy_(self.read(name))
        else:
            self._upload = self._upload or Upload(device)
            for part, source in zip(parts, sources, strict=True):
                self._upload.fill(part, source)
        return rows

    def finish(self) -> None:
        """Returns when all that was read is whole. Errors: InvalidArgumentError where it cannot be read."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.finish()
            speed = f"{upload.num_bytes / upload.seconds / 1e9:.1f} GB/s"
            log.info("server.weights", seconds=round(upload.seconds, 2), speed=speed)


def _files(folder: Path) -> Mapping[Path, Sequence[str] | None]:
    """The files, and which of their tensors count; None is all of them."""
    index = folder / _INDEX
    if index.is_file():
        try:
            places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            files: dict[Path, list[str]] = defaultdict(list)
            for name, file in places.items():
                files[folder / file].append(name)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(f"{index} is not an index of safetensors files: {error!r}") from error
        return dict(files)
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    raise InvalidArgumentError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}; save the model as safetensors (transformers' "
        "save_pretrained does)"
    )


def _read_header(path: Path, wanted: Sequence[str] | None) -> dict[str, TensorBytes]:
    try:
        with safe_open(path, framework="pt"):  # refuses what is damaged or cut off
            header, start = _parse_header(path)
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}; fetch the model again") from error
    names = header if wanted is None else [name for name in wanted if name in header]
    return {
        name: _place(name, header[name], path, start) for name in names if not name.endswith(_IGNORED_SUFFIX)
    }


def _parse_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of its tensors by name, and where the first one begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, _LENGTH_BYTES + length


def _place(name: str, entry: Mapping[str, Any], path: Path, start: int) -> TensorBytes:
    dtype = entry["dtype"]
    if dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"{name} in {path} is {dtype}; served are {', '.join(_DTYPES)}: use the unquantized model"
        )
    return TensorBytes(path, start + entry["data_offsets"][0], tuple(entry["shape"]), _DTYPES[dtype])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
