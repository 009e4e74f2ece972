"""Where the time of a step goes on the GPU, kernel by kernel.

Kernels run side by side, such as LoRA's shrink beside the base's product, and many start long before the one
ahead of them ends, to read what it does not write. So a kernel counts from the end of the one that ended
before it to its own end, less what nothing ran in: all of them together take what the GPU was at work.
Watched kernels come with gaps between them, so that a GPU at the limit of its power may keep a higher clock
than in a run that nobody watches.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from bench.gpu_trace import Span

OTHER = "other"
_GROUPS = {
    "products": re.compile(r"nvjet|gemm|gemv|splitk|cublas|cutlass|^few_rows", re.IGNORECASE),
    "LoRA shrink": re.compile(r"^_?shrink"),
    "LoRA expand": re.compile(r"^_?expand"),
    "attention": re.compile(r"^(_decode|_prefill|decode_b?float16_.*)$"),
    "norms": re.compile(r"^_rms_norm$"),
    "rotary and KV write": re.compile(r"^_(rotary_factors|rotate_and_write)$"),
    "activation": re.compile(r"^_silu_mul$"),
    "sampling": re.compile(r"^_(of_chunks|of_rows|measure|draw|sample|choose)$"),
    "copies": re.compile(r"memcpy|memset|copy|gather|indexselect", re.IGNORECASE),
}
"""Kernels and copies by what is found in their names; the first that fits counts."""


@dataclass(frozen=True)
class KernelTime:
    """Of a step. ms: of all calls together, as said above. calls: how many there are, on average.
    ran_ms: of all calls together, from start to end each."""

    group: str
    name: str
    ms: float
    calls: float
    ran_ms: float

    @property
    def us_per_call(self) -> float:
        return 1e3 * self.ran_ms / self.calls


def kernels_per_step(spans: Iterable[Span], num_steps: int) -> list[KernelTime]:
    """Of so many steps. The group that takes longest comes first, and in it the kernel that does."""
    by_end = sorted(spans, key=lambda span: span.stop)
    first_starts = list(accumulate((span.start for span in reversed(by_end)), min))[::-1]  # from each span on
    totals: dict[tuple[str, str], tuple[int, int, int]] = {}
    ended = 0
    for span, first_start in zip(by_end, first_starts, strict=True):
        key = group_of(span.name), short_name(span.name)
        ns, calls, ran = totals.get(key, (0, 0, 0))
        totals[key] = ns + span.stop - max(ended, first_start), calls + 1, ran + span.stop - span.start
        ended = span.stop
    kernels = [
        KernelTime(*key, ns / 1e6 / num_steps, calls / num_steps, ran / 1e6 / num_steps)
        for key, (ns, calls, ran) in totals.items()
    ]
    by_group = {group: sum(k.ms for k in kernels if k.group == group) for group in (*_GROUPS, OTHER)}
    return sorted(kernels, key=lambda kernel: (-by_group[kernel.group], kernel.group, -kernel.ms))


def group_of(name: str) -> str:
    """name: as the driver knows it."""
    return next((group for group, pattern in _GROUPS.items() if pattern.search(name)), OTHER)


def short_name(name: str) -> str:
    """A kernel's name without what it returns, its namespaces, and the types it was made for and takes."""
    plain = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    return plain if plain.startswith("Mem") else re.split(r"[<(]", plain)[0].rpartition("::")[2]


def table_rows(kernels: Sequence[KernelTime], step_ms: float) -> list[list[str]]:
    """Lines of a table: name, ms of a step, calls in it, us of a call from its start to its end. Groups with
    their kernels, and all.

    kernels: as `kernels_per_step` answers them. step_ms: what a step takes.
    """
    rows = []
    for group, members in groupby(kernels, key=lambda kernel: kernel.group):
        of_group = list(members)
        rows.append(_line(group, of_group))
        rows += [_line(f"  {kernel.name}", [kernel]) for kernel in of_group]
    share = sum(kernel.ms for kernel in kernels) / step_ms
    return [*rows, _line("kernels in all", kernels), ["of the step", f"{100 * share:.1f} %", "", ""]]


def _line(name: str, kernels: Sequence[KernelTime]) -> list[str]:
    ms, calls, ran_ms = (sum(getattr(k, field) for k in kernels) for field in ("ms", "calls", "ran_ms"))
    total = KernelTime("", name, ms, calls, ran_ms)
    return [name, f"{total.ms:.3f}", f"{total.calls:.1f}", f"{total.us_per_call:.1f}" if kernels else ""]
