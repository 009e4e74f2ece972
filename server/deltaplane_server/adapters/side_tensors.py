"""What an adapter has outside the linears of the layers: where it is in its file, and whether that is served.

Served exactly are LoRA on embed_tokens and on lm_head, trained norms, and a trained table of embed_tokens.
PEFT also saves the base's own table or head beside LoRA on them (save_embedding_layers): these copies must
equal this base's. Where a base ties table and head, PEFT changes one of them alone, unless it is told to
ensure_weight_tying: then the head has the embedding's LoRA, transposed, and is saved with it. Read from
peft.tuners and peft.utils of PEFT 0.21.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deltaplane_kernels.layout import AdapterLayout, OutsideLayers
from deltaplane_kernels.side_pages import NOTHING, SideShape
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from deltaplane_server.adapters.lora_matrices import LoraMatrices, check_rank
from deltaplane_server.adapters.module_matching import ModuleMatcher, endings
from deltaplane_server.adapters.peft_config import PeftLoraConfig
from deltaplane_server.adapters.safetensors_header import TensorEntry
from deltaplane_server.adapters.side_names import (
    BASE_WEIGHT,
    EMBEDDING,
    HEAD,
    LORA_PARTS,
    WEIGHT,
    Parts,
    sort_side,
)
from deltaplane_server.adapters.tensor_names import NamedTensors, not_served
from deltaplane_server.adapters.trained_modules import trained_modules
from deltaplane_server.adapters.unservable import listed, shown, unservable


@dataclass(frozen=True, slots=True)
class SideTensors:
    """Where the parts of an adapter outside the layers' linears are in its file.

    shape: which ones it has.
    head: a [rank, H], b [V, rank]. embedding: a [rank, V], b [H, rank].
    table: [V, H]. norms: by path, [size].
    base_copies: tables [V, H] that must equal the base's: whose each is, EMBEDDING or HEAD, and where.
    is_tied: whether A and B of the head must be the embedding's B and A, transposed.
    """

    shape: SideShape = NOTHING
    head: LoraMatrices | None = None
    embedding: LoraMatrices | None = None
    table: TensorEntry | None = None
    norms: tuple[tuple[str, TensorEntry], ...] = ()
    base_copies: tuple[tuple[str, TensorEntry], ...] = ()
    is_tied: bool = False

    def scales(self) -> dict[TensorEntry, float]:
        """What each tensor is multiplied by; 0 where it goes nowhere."""
        scales = {entry: 1.0 for _, entry in self.norms} | {entry: 0.0 for _, entry in self.base_copies}
        for lora in (self.head, self.embedding):
            if lora is not None:
                scales |= {lora.a: 1.0, lora.b: lora.scale}
        return scales if self.table is None else scales | {self.table: 1.0}

    def ranks(self) -> dict[str, int]:
        """Of each module that has LoRA."""
        ranks = {EMBEDDING: self.shape.embedding_rank, HEAD: self.shape.head_rank}
        return {module: rank for module, rank in ranks.items() if rank}

    def layers(self) -> set[int]:
        """Those whose norms it has."""
        return {int(path.split(".")[1]) for path, _ in self.norms if path.startswith("layers.")}

    def features(self) -> set[str]:
        """See AdapterManifest."""
        trained = {"trained_norms": bool(self.norms), "trained_embeddings": self.table is not None}
        return {*self.ranks(), *(feature for feature, is_there in trained.items() if is_there)}


def find_side(
    names: NamedTensors, config: PeftLoraConfig, layout: AdapterLayout, max_rank: int
) -> SideTensors:
    """What the file has outside the linears of the layers. names: with their root (with_root).

    Errors: InvalidArgumentError where names, shapes and ranks are not exactly what the configuration gives
    to this base, where a rank is over max_rank, or where something is not served.
    """
    finder = _Finder(names, config, layout, max_rank)
    if layout.outside is not None:
        return finder.find(layout.outside)
    finder.expect_nothing()
    return SideTensors()


class _Finder:
    """See find_side. full_names: of table and head, in the base that the adapter was trained on."""

    def __init__(
        self, names: NamedTensors, config: PeftLoraConfig, layout: AdapterLayout, max_rank: int
    ) -> None:
        self._names = names
        self._config = config
        self._layout = layout
        self._max_rank = max_rank
        self._matcher = ModuleMatcher(config)
        head = f"language_model.{HEAD}" if names.root == "language_model.model." else HEAD
        self._full_names = {EMBEDDING: names.root + EMBEDDING, HEAD: head}

    def expect_nothing(self) -> None:
        """For a base that has nothing outside the linears."""
        asked = [module for module, name in self._full_names.items() if self._matcher.is_target(name)]
        if asked:
            raise unservable(f"{CONFIG_FILE} targets {listed(asked)}; this base takes no LoRA there")
        if self._config.modules_to_save:
            raise unservable(f"{CONFIG_FILE} has modules_to_save; this base takes none")
        self._expect_none(self._names.outside)

    def find(self, outside: OutsideLayers) -> SideTensors:
        vocab, hidden = outside.vocab_size, outside.hidden_size
        sizes: dict[str, tuple[int, ...]] = {norm: (size,) for norm, size in outside.norms.items()}
        sizes[EMBEDDING] = (vocab, hidden)
        trained = self._trained(sizes)
        ranks = {module: self._rank(module) for module in self._adapted(trained)}
        is_tied = self._ties(outside, trained, ranks)
        if is_tied:
            ranks = dict.fromkeys((EMBEDDING, HEAD), self._rank(EMBEDDING))
        parts, others = sort_side(self._names, outside)
        self._expect_none(others)
        head = self._take_lora(parts, HEAD, ranks[HEAD], hidden, vocab) if HEAD in ranks else None
        embedding = (
            self._take_lora(parts, EMBEDDING, ranks[EMBEDDING], vocab, hidden) if EMBEDDING in ranks else None
        )
        weights = {path: _take_weight(parts, path, sizes[path]) for path in trained}
        table = weights.pop(EMBEDDING, None)
        copies = _take_base_copies(parts, (vocab, hidden))
        _expect_nothing_left(parts)
        shape = SideShape(
            head_rank=head.rank if head else 0,
            embedding_rank=embedding.rank if embedding else 0,
            has_table=table is not None,
            norms=tuple(weights),
        )
        return SideTensors(shape, head, embedding, table, tuple(weights.items()), tuple(copies), is_tied)

    def _expect_none(self, others: Sequence[TensorEntry]) -> None:
        if others:
            modules = [part.module for linear in self._layout.linears for part in linear.slices]
            raise not_served([entry.name for entry in others], modules)

    def _trained(self, served: Iterable[str]) -> list[str]:
        by_name = {self._names.root + path: path for path in served}
        head, root = self._full_names[HEAD], self._names.root
        return trained_modules(self._config, by_name, head, self._layout, root)

    def _adapted(self, trained: Sequence[str]) -> list[str]:
        """The modules that have LoRA. PEFT gives none to a module that it trains whole by its name, or by an
        ending of that at a dot, and fails for one that it trains by another ending."""
        adapted = [module for module, name in self._full_names.items() if self._matcher.is_target(name)]
        if EMBEDDING in adapted and EMBEDDING in trained:
            if set(endings(self._full_names[EMBEDDING])).isdisjoint(self._config.modules_to_save):
                raise unservable(f"{CONFIG_FILE} has {EMBEDDING} in target_modules and in modules_to_save")
            adapted.remove(EMBEDDING)
        for feature, is_set in (("DoRA", self._config.use_dora), ("lora_bias", self._config.lora_bias)):
            if adapted and is_set:
                raise unservable(f"{CONFIG_FILE} asks for {feature} on {listed(adapted)}; not served there")
        return adapted

    def _rank(self, module: str) -> int:
        name = self._full_names[module]
        rank = self._matcher.rank(name)
        check_rank(name, rank, self._max_rank)
        return rank

    def _ties(self, outside: OutsideLayers, trained: Sequence[str], adapted: Collection[str]) -> bool:
        """Whether LoRA on one of table and head is on both. PEFT ties them where it is told to and finds one
        of them in target_modules by its last name."""
        if not (self._config.ensure_weight_tying and outside.is_tied):
            return False
        if EMBEDDING in trained:
            raise unservable(
                f"{CONFIG_FILE} has {EMBEDDING} in modules_to_save and sets ensure_weight_tying, so that the "
                "head is trained too; a whole head of its own is not served"
            )
        targets = self._config.target_modules
        if isinstance(targets, str):
            return bool(adapted) and any(self._matcher.is_target(module) for module in self._full_names)
        return any(target.rpartition(".")[2] in self._full_names for target in targets)

    def _take_lora(
        self, parts: Parts, module: str, rank: int, in_features: int, out_features: int
    ) -> LoraMatrices:
        name, kinds, own = self._full_names[module], LORA_PARTS[module], parts.get(module, {})
        missing = [kind for kind in kinds if kind not in own]
        if missing:
            raise unservable(
                f"{CONFIG_FILE} targets {name}; {WEIGHTS_FILE} has no {' and no '.join(missing)} of it"
            )
        a, b = (own.pop(kind) for kind in kinds)
        _check_shape(a, name, (rank, in_features))
        _check_shape(b, name, (out_features, rank))
        return LoraMatrices(rank=rank, scale=self._matcher.scale(name), a=a, b=b)


def _take_weight(parts: Parts, path: str, shape: tuple[int, ...]) -> TensorEntry:
    entry = parts.get(path, {}).pop(WEIGHT, None)
    if entry is None:
        raise unservable(f"{CONFIG_FILE} has {path} in modules_to_save; {WEIGHTS_FILE} has no weight of it")
    _check_shape(entry, path, shape)
    return entry


def _take_base_copies(parts: Parts, shape: tuple[int, ...]) -> list[tuple[str, TensorEntry]]:
    copies = []
    for module in (EMBEDDING, HEAD):
        for part in (WEIGHT, BASE_WEIGHT):
            entry = parts.get(module, {}).pop(part, None)
            if entry is not None:
                _check_shape(entry, module, shape)
                copies.append((module, entry))
    return copies


def _expect_nothing_left(parts: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    left = [entry.name for own in parts.values() for entry in own.values()]
    if left:
        raise unservable(
            f"{WEIGHTS_FILE} has weights that {CONFIG_FILE} does not ask for, so that PEFT would leave them "
            f"out: {listed(left)}"
        )


def _check_shape(entry: TensorEntry, module: str, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise unservable(
            f"{shown(entry.name)} has shape {entry.shape}; {module} of this base, with the ranks of "
            f"{CONFIG_FILE}, takes {shape}"
        )
