"""What the two files of an adapter say, checked against each other and against the base."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.rank_pages import rank_pages
from deltaplane_kernels.side_pages import side_page_layout
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.lora_matrices import AdaptedSlice, find_matrices
from deltaplane_server.adapters.peft_config import PeftLoraConfig
from deltaplane_server.adapters.safetensors_header import SafetensorsHeader, TensorEntry
from deltaplane_server.adapters.side_names import with_root
from deltaplane_server.adapters.side_tensors import SideTensors, find_side
from deltaplane_server.adapters.tensor_names import NamedTensors, sort_tensors
from deltaplane_server.adapters.unservable import unservable


@dataclass(frozen=True, slots=True)
class FileContents:
    """What a file of weights has, whatever its configuration says of it.

    names: its tensors by what they belong to. header_bytes: before the tensors.
    """

    names: NamedTensors
    header_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """What is to be read of an adapter, and where it goes.

    slices: what it has for the linears of layers, ordered by layer.
    side: what it has outside of them, which takes num_side_pages.
    header_bytes: of the weights' file, before its tensors.
    """

    config: PeftLoraConfig
    slices: tuple[AdaptedSlice, ...]
    side: SideTensors
    num_side_pages: int
    header_bytes: int

    @property
    def rank(self) -> int:
        """The highest."""
        return max([*(one.rows.rank for one in self.slices), *self.side.ranks().values()], default=0)

    @property
    def num_rank_pages(self) -> int:
        return rank_pages(max((one.rows.num_rows for one in self.slices), default=0))

    @property
    def num_pages(self) -> int:
        """Pages of the device that it takes."""
        return self.num_rank_pages + self.num_side_pages

    @property
    def num_layers(self) -> int:
        """Layers that it changes."""
        return len({one.layer for one in self.slices} | self.side.layers())

    @property
    def is_plain(self) -> bool:
        """Whether it is LoRA alone, which needs no weight of the base."""
        return not self.side.base_copies and all(one.rows.is_plain for one in self.slices)

    def scales(self) -> dict[TensorEntry, float]:
        """What each tensor is multiplied by; 0 where it goes into something else and need only be finite."""
        scales = self.side.scales()
        for one in self.slices:
            if one.bias is not None:
                scales[one.bias] = 0.0
            if one.lora is not None:
                scales[one.lora.a] = 1.0
                scales[one.lora.b] = one.lora.scale if one.lora.magnitude is None else 0.0
                others = (one.lora.b_bias, one.lora.magnitude)
                scales |= {entry: 0.0 for entry in others if entry is not None}
        return scales

    def features(self) -> tuple[str, ...]:
        """See AdapterManifest."""
        found = self.side.features()
        for one in self.slices:
            if one.rows.has_gain:
                found.add("dora")
            if one.bias is not None or (one.lora is not None and one.lora.b_bias is not None):
                found.add("bias")
        return tuple(sorted(found))

    def target_modules(self) -> tuple[str, ...]:
        """The kinds of modules that have LoRA, such as "q_proj"."""
        in_layers = (_kind(one.module) for one in self.slices if one.lora is not None)
        return tuple(dict.fromkeys([*in_layers, *self.side.ranks()]))

    def rank_pattern(self) -> Mapping[str, int]:
        """Ranks other than `rank`: by kind of module ("q_proj") where all its layers agree, else by path."""
        ranks = self.side.ranks() | {
            f"layers.{one.layer}.{one.module}": one.rows.rank for one in self.slices if one.lora is not None
        }
        highest = self.rank
        by_kind: dict[str, set[int]] = defaultdict(set)
        for path, rank in ranks.items():
            by_kind[_kind(path)].add(rank)
        return {
            _kind(path) if len(by_kind[_kind(path)]) == 1 else path: rank
            for path, rank in ranks.items()
            if rank != highest
        }


def contents_of(header: SafetensorsHeader, layout: AdapterLayout) -> FileContents:
    """Errors: InvalidArgumentError where it is empty, or where its names are those of no one base."""
    modules = [part.module for linear in layout.linears for part in linear.slices]
    names = with_root(sort_tensors(header.entries, modules))
    if not header.entries:
        raise unservable(f"{WEIGHTS_FILE} has no weights")
    return FileContents(names, header.num_bytes)


def make_plan(
    config: PeftLoraConfig, contents: FileContents, layout: AdapterLayout, max_rank: int
) -> AdapterPlan:
    """Errors: InvalidArgumentError where the file has not exactly what the configuration gives to this base,
    or where a rank is over max_rank."""
    names = contents.names
    side = find_side(names, config, layout, max_rank)
    slices = find_matrices(names, config, layout, max_rank)
    if not slices and not side.ranks():
        raise unservable(f"{CONFIG_FILE} targets no module of this base, so that PEFT would not load it")
    return AdapterPlan(config, tuple(slices), side, _num_side_pages(side, layout), contents.header_bytes)


def _num_side_pages(side: SideTensors, layout: AdapterLayout) -> int:
    pages = side_page_layout(layout) if side.shape else None
    try:
        return pages.place(side.shape).num_pages if pages is not None else 0
    except ValueError as error:
        raise unservable(
            f"{' and '.join(sorted(side.features()))} cannot be served with this base: {error}"
        ) from error


def _kind(path: str) -> str:
    return path.rpartition(".")[2]
