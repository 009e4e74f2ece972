"""The tensors of a Hugging Face folder, read one by one from its safetensors files."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltaplane_controlplane.errors import InvalidArgumentError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; it is computed from the config."""
_NAMES_SHOWN = 8


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
        """The tensors below each other, as one tensor of `dtype` on `device`."""
        ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """file: that holds the tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """Where each tensor of a checkpoint is, and what it looks like. Holds no weight and no open file.

    tensors: name to place, shape and dtype.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the headers of model.safetensors, or of the shards that model.safetensors.index.json names.

        Errors: InvalidArgumentError, which names the file that is missing or broken, or the tensor whose
        dtype is not float32, bfloat16 or float16.
        """
        files = _files(folder)
        tensors: dict[str, TensorInfo] = {}
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
        try:
            with safe_open(self.tensors[name].file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise InvalidArgumentError(f"{self.tensors[name].file} cannot be read: {error}") from error

    def read_rows(self, *names: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensors below each other, as one tensor of `dtype` on `device`."""
        shapes = [self.tensors[name].shape for name in names]
        rows = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=device)
        for part, name in zip(torch.split(rows, [shape[0] for shape in shapes]), names, strict=True):
            part.copy_(self.read(name))
        return rows


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


def _read_header(file: Path, wanted: Sequence[str] | None) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as shard:
            present = set(shard.keys())
            names = [n for n in wanted if n in present] if wanted is not None else present
            slices = {name: shard.get_slice(name) for name in names if not name.endswith(_IGNORED_SUFFIX)}
            headers = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(f"{file} cannot be read: {error}; fetch the model again") from error
    for name, (_, dtype) in headers.items():
        if dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"{name} in {file} is {dtype}; served are {', '.join(_DTYPES)}: use the unquantized model"
            )
    return {name: TensorInfo(file, shape, _DTYPES[dtype]) for name, (shape, dtype) in headers.items()}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
