"""Which modules a LoRA configuration targets, and with which rank and alpha, by PEFT's own rules.

The rules are those of check_target_module_exists and get_pattern_key in PEFT 0.21. Patterns come from files
nobody vouches for, and a hostile one keeps Python's re busy for ever while no other thread may run. So they
are matched by the regex package, which gives up after a time and lets other threads run; what the two would
read differently is refused.
"""

import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import TypeVar

import regex

from deltaplane_server.adapters.files import CONFIG_FILE
from deltaplane_server.adapters.peft_config import PeftLoraConfig
from deltaplane_server.adapters.unservable import shown, unservable

MAX_PATTERN_LENGTH = 4096
MAX_REPETITIONS = 1000
MAX_EXPANDED_LENGTH = 1 << 17
"""Characters of all patterns of a configuration, each times its repetitions: what compiling takes follows it,
by about 200 bytes and 5 us each."""
MAX_CACHED_LENGTH = 1024
"""Of a pattern, expanded, that the regex package may keep compiled; it keeps up to 500."""
MATCH_SECONDS = 5.0

_NAMES_KEPT = 4096
"""Of modules, which are those of one base: their endings are asked for with each adapter."""

OUTSIDE_LAYERS = ("embed_tokens", "lm_head")
"""Modules of a base model that PEFT can adapt and that are in no decoder layer."""

_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_READ_DIFFERENTLY = re.compile(r"\[[:\[]|--|&&|~~|\|\||\{(?!\d+(?:,\d*)?\}|,\d+\})")
_LAYER_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

T = TypeVar("T")


class ModuleMatcher:
    """Answers for the names of modules in the base model, such as "model.layers.0.self_attn.q_proj".

    Errors, of all methods: InvalidArgumentError where a pattern is not valid or matching takes too long.
    """

    def __init__(self, config: PeftLoraConfig) -> None:
        self._config = config
        self._deadline = time.monotonic() + MATCH_SECONDS
        self._room = MAX_EXPANDED_LENGTH
        self._layers_patterns = [
            self._compile("layers_pattern", name, rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.")
            for name in config.layers_pattern
        ]
        self._target = self._names("target_modules", config.target_modules)
        self._exclude = self._names("exclude_modules", config.exclude_modules)
        self._ranks = self._suffixes("rank_pattern", config.rank_pattern)
        self._alphas = self._suffixes("alpha_pattern", config.alpha_pattern)

    def is_target(self, name: str) -> bool:
        """Whether the configuration gives the module an adapter."""
        if self._has(self._exclude, name):
            return False
        if self._config.targets_all_linear:
            return name.rpartition(".")[2] not in OUTSIDE_LAYERS
        if not self._has(self._target, name):
            return False
        # A name in full is not bound to layers_to_transform.
        return name in self._config.target_modules or self._is_in_layers(name)

    def rank(self, name: str) -> int:
        """The rank that the configuration gives the module."""
        return self._first(self._ranks, name, self._config.rank)

    def scale(self, name: str) -> float:
        """The factor on the module's B A."""
        return self._config.scale(self._first(self._alphas, name, self._config.alpha), self.rank(name))

    def _is_in_layers(self, name: str) -> bool:
        layers = self._config.layers_to_transform
        if not layers:
            return True
        if self._layers_patterns:
            found = (self._run(pattern.match, name) for pattern in self._layers_patterns)
            match = next((one for one in found if one), None)
        else:
            match = _LAYER_INDEX.match(name)
        # An alternative in the pattern may match without the index.
        return match is not None and match["idx"] is not None and int(match["idx"]) in layers

    def _first(self, patterns: list[tuple["regex.Pattern[str]", T]], name: str, default: T) -> T:
        return next((value for pattern, value in patterns if self._run(pattern.match, name)), default)

    def _has(self, names: "frozenset[str] | regex.Pattern[str]", name: str) -> bool:
        if isinstance(names, frozenset):
            return not names.isdisjoint(endings(name))
        return self._run(names.fullmatch, name) is not None

    def _run(self, match: Callable[..., "regex.Match[str] | None"], name: str) -> "regex.Match[str] | None":
        try:
            return match(name, timeout=self._seconds_left(), concurrent=True)
        except TimeoutError as error:
            raise self._too_slow() from error

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._too_slow()
        return left

    def _too_slow(self) -> Exception:
        return unservable(f"{CONFIG_FILE} has patterns that take over {MATCH_SECONDS:g} s; simplify them")

    def _names(self, key: str, names: str | tuple[str, ...]) -> "frozenset[str] | regex.Pattern[str]":
        return self._compile(key, names, names) if isinstance(names, str) else frozenset(names)

    def _suffixes(self, key: str, table: Mapping[str, T]) -> list[tuple["regex.Pattern[str]", T]]:
        return [(self._compile(key, name, rf"(.*\.)?({name})$"), value) for name, value in table.items()]

    def _compile(self, key: str, text: str, whole: str) -> "regex.Pattern[str]":
        """Compiles `whole`, the pattern `text` of the file in PEFT's own frame."""
        self._seconds_left()
        length = self._expanded_length(key, text)
        try:
            re.compile(whole)
            return regex.compile(whole, cache_pattern=length <= MAX_CACHED_LENGTH)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise unservable(
                f"{CONFIG_FILE} has no valid pattern in {key}: {shown(text)}: {shown(str(error))}"
            ) from error

    def _expanded_length(self, key: str, text: str) -> int:
        """The length of a pattern times its repetitions, for which there must be room."""
        if len(text) <= MAX_PATTERN_LENGTH and not _READ_DIFFERENTLY.search(text):
            repetitions = _repetitions(text)
            length = len(text) * repetitions
            self._room -= length
            if repetitions <= MAX_REPETITIONS and self._room >= 0:
                return length
        raise unservable(
            f"{CONFIG_FILE} has the pattern {shown(text)} in {key}; patterns are of at most "
            f"{MAX_PATTERN_LENGTH} characters and {MAX_REPETITIONS} counted repetitions, all together of "
            f"{MAX_EXPANDED_LENGTH} characters times repetitions, without nested sets or literal braces"
        )


def _repetitions(text: str) -> int:
    """How often a pattern's counts may repeat its innermost part: compiling takes as much memory."""
    return prod(max(int(count or 1) for count in counts) for counts in _COUNT.findall(text))


@lru_cache(_NAMES_KEPT)
def endings(name: str) -> tuple[str, ...]:
    """The name, and what follows each of its dots."""
    parts = name.split(".")
    return tuple(".".join(parts[first:]) for first in range(len(parts)))
