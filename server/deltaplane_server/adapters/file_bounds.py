"""How large the files of an adapter may be: no larger than what is servable can be."""

from deltaplane_controlplane.ports import MAX_VECTOR_ROWS, rank_pages
from deltaplane_server.adapters.files import LENGTH_BYTES, MAX_HEADER_BYTES
from deltaplane_server.adapters.peft_config import MAX_CONFIG_BYTES
from deltaplane_server.adapters.remote.host import FileBounds
from deltaplane_server.backend import ModelFacts

_NORMS_PER_LAYER = 4
_FLOAT32_BYTES = 4


def file_bounds(facts: ModelFacts, max_lora_rank: int, page_bytes: int) -> FileBounds:
    """Bounds for adapters of this base, of which all is there, in float32 and of the highest rank.

    page_bytes: of a rank page, whose elements have two bytes at least.
    """
    in_layers = 2 * page_bytes * rank_pages(max_lora_rank + MAX_VECTOR_ROWS)
    table = facts.vocab_size * facts.hidden_size
    # Of the table as of the head: A, B, and either a trained weight or a copy of the base's.
    vocabulary = 2 * (max_lora_rank * (facts.vocab_size + facts.hidden_size) + table)
    norms = (_NORMS_PER_LAYER * facts.num_layers + 1) * facts.hidden_size
    return FileBounds(
        max_config_bytes=MAX_CONFIG_BYTES,
        max_weights_bytes=LENGTH_BYTES + MAX_HEADER_BYTES + in_layers + _FLOAT32_BYTES * (vocabulary + norms),
    )
