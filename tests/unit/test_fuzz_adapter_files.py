"""Adapter files that nobody vouches for: whatever is in them, they are read or refused with one error, in
bounded time and memory.

    pytest tests/unit/test_fuzz_adapter_files.py --hypothesis-profile=fuzz --timeout=0   # ten minutes of it
"""

import io
import json
import math
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from adapter_files import (
    BIASED,
    RANK,
    make_affine_tensors,
    make_config,
    make_embedding_tensors,
    make_head_tensors,
    make_norm_tensors,
    make_tensors,
    with_outside,
)
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.status import to_status
from deltaplane_server.adapters import module_matching
from deltaplane_server.adapters.adapter_plan import contents_of, make_plan
from deltaplane_server.adapters.files import LENGTH_BYTES, MAX_HEADER_BYTES
from deltaplane_server.adapters.module_matching import MAX_EXPANDED_LENGTH, ModuleMatcher
from deltaplane_server.adapters.peft_config import MAX_CONFIG_BYTES, parse_config
from deltaplane_server.adapters.safetensors_header import SafetensorsHeader, read_header
from deltaplane_server.adapters.unservable import shown

T = TypeVar("T")

PATIENCE_S = 60.0
MAX_MESSAGE = 2000
BYTES_PER_BYTE = 64
"""Of memory, for each byte of a file: JSON's smallest object is three of them and a Python dict."""
BYTES_PER_PATTERN_BYTE = 256
"""Of memory, for each character of a pattern times its repetitions, while it is compiled."""
BYTES_ANYWAY = 4 << 20

whatever = settings(deadline=None)


@pytest.fixture(scope="module", autouse=True)
def little_time_for_patterns() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_matching, "MATCH_SECONDS", 0.25)
        yield


def outcome(act: Callable[[], T], max_bytes: int) -> T | None:
    """What `act` answers; None where it refuses with an error that can be sent. On a thread, as in a server.

    max_bytes: of memory at the peak.
    """
    refusal: InvalidArgumentError | None = None
    answer: T | None = None
    with ThreadPoolExecutor(1) as thread:
        tracemalloc.start()
        try:
            answer = thread.submit(act).result(PATIENCE_S)
        except InvalidArgumentError as error:
            refusal = error
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak <= max_bytes, f"{peak} bytes of memory where {max_bytes} are allowed"
    if refusal is not None:
        assert [violation.field for violation in refusal.violations] == ["source"]
        assert len(refusal.message) < MAX_MESSAGE
        assert refusal.message.isprintable()
        assert to_status(refusal).message == refusal.message
    return answer


def read(data: bytes) -> SafetensorsHeader | None:
    """The header of a file, which must describe all of it."""
    header = outcome(
        lambda: read_header(io.BytesIO(data).read, len(data)), BYTES_ANYWAY + BYTES_PER_BYTE * len(data)
    )
    if header is not None:
        position = 0
        for entry in header.entries:
            assert entry.start == position
            assert entry.nbytes == entry.dtype.itemsize * math.prod(entry.shape)
            position = entry.stop
        assert header.num_bytes + position == len(data)
    return header


def with_header(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(LENGTH_BYTES, "little") + header + body


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# JSON as text, so that what no encoder writes can be said too.


def braced(members: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{key}:{value}" for key, value in members) + "}"


numbers = st.one_of(
    st.integers().map(str),
    st.sampled_from([2**31, 2**32, 2**47, 2**48 - 1, 2**48, 2**63, 2**64, 2**80, -1, -(2**63)]).map(str),
    st.floats().map(repr),
    st.sampled_from(
        ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400", "-0", "01", "+1", "0x10", "1."]
    ),
    st.integers(1, 5000).map(lambda n: "9" * n),
    st.integers(1, 5000).map(lambda n: f"0.{'1' * n}e-{n}"),
)
strings = st.one_of(
    st.text(max_size=20).map(json.dumps),
    st.text(st.characters(codec=None), max_size=20).map(lambda s: json.dumps(s, ensure_ascii=False)),
    st.sampled_from(['"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\x"', '"a', '"\t"']),
    st.integers(0, 10_000).map(lambda n: json.dumps("x" * n)),
)
atoms = st.one_of(numbers, strings, st.sampled_from(["null", "true", "false", "", "nul", "]", "{"]))


def lists_of(items: st.SearchStrategy[str], max_size: int = 6) -> st.SearchStrategy[str]:
    return st.lists(items, max_size=max_size).map(lambda texts: f"[{','.join(texts)}]")


def objects_of(
    keys: st.SearchStrategy[str], values: st.SearchStrategy[str], max_size: int = 6
) -> st.SearchStrategy[str]:
    """Objects that may have a key twice."""
    pairs = st.lists(st.tuples(keys, values), max_size=max_size)
    return pairs.map(braced)


deep = st.tuples(st.sampled_from([("[", "]"), ('{"a":', "}")]), st.integers(1, 3000)).map(
    lambda t: t[0][0] * t[1] + "0" + t[0][1] * t[1]
)
many = st.tuples(st.sampled_from(["[]", "{}", "0", '""', "-1", "[0]"]), st.integers(1, 5000)).map(
    lambda t: f"[{','.join([t[0]] * t[1])}]"
)
anything = st.recursive(
    atoms | deep | many, lambda inner: lists_of(inner) | objects_of(strings, inner), max_leaves=8
)


# The header of the weights.


class Good(NamedTuple):
    """An adapter that is served: its weights' file, what the header says, and its configuration."""

    file: bytes
    members: dict[str, Any]
    config: dict[str, Any]

    @property
    def header_bytes(self) -> int:
        return LENGTH_BYTES + int.from_bytes(self.file[:LENGTH_BYTES], "little")

    @property
    def body(self) -> bytes:
        return self.file[self.header_bytes :]

    @property
    def header(self) -> SafetensorsHeader:
        return read_header(io.BytesIO(self.file).read, len(self.file))


def good(tensors: dict[str, Tensor], **config: Any) -> Good:
    file = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    length = int.from_bytes(file[:LENGTH_BYTES], "little")
    return Good(file, json.loads(file[LENGTH_BYTES : LENGTH_BYTES + length]), make_config(**config))


BASE = with_outside(BIASED)
GOOD = [
    good(make_tensors()),
    good(make_affine_tensors(), use_dora=True, bias="lora_only"),
    good(
        make_tensors() | make_head_tensors() | make_embedding_tensors() | make_norm_tensors("norm"),
        target_modules=[*make_config()["target_modules"], "lm_head", "embed_tokens"],
        modules_to_save=["model.norm"],
    ),
]
"""Of a base with biases: one with LoRA alone, one with DoRA and trained biases too, and one with LoRA on the
vocabulary and a trained norm."""

GOOD_HEADERS = [one.header for one in GOOD]
GOOD_NAMES = [name for one in GOOD for name in one.members]

sizes = st.integers(-2, 2**10) | st.sampled_from([2**32, 2**47, 2**48 - 1, 2**48, 2**63, 2**64 - 1])
fields = {
    "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "f32", "F8_E4M3", ""]).map(json.dumps)
    | anything,
    "shape": st.lists(sizes, max_size=10).map(json.dumps) | lists_of(numbers) | anything,
    "data_offsets": st.lists(sizes, min_size=2, max_size=2).map(json.dumps) | lists_of(numbers, 3) | anything,
}
names = st.one_of(
    st.sampled_from(GOOD_NAMES).map(json.dumps),
    st.tuples(st.sampled_from(GOOD_NAMES), st.integers(0, 80), st.text(max_size=3)).map(
        lambda t: json.dumps(t[0][: t[1]] + t[2] + t[0][t[1] :])
    ),
    st.just('"__metadata__"'),
    strings,
)
entries = st.fixed_dictionaries({}, optional=fields).map(
    lambda values: braced((f'"{key}"', value) for key, value in values.items())
)


@st.composite
def changed_headers(draw: st.DrawFn) -> tuple[Good, bytes]:
    """A good header in which a few members were replaced, doubled, renamed, or given another field."""
    one = draw(st.sampled_from(GOOD))
    members = [
        (json.dumps(name), {json.dumps(key): json.dumps(part) for key, part in value.items()})
        for name, value in one.members.items()
    ]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(members) - 1))
        name, values = members[place]
        match draw(st.sampled_from(["field", "name", "twice", "gone", "swap"])):
            case "field":
                key = draw(st.sampled_from(list(fields)))
                members[place] = name, {**values, json.dumps(key): draw(fields[key])}
            case "name":
                members[place] = draw(names), values
            case "twice":
                members.append((name, values))
            case "gone" if len(members) > 1:
                del members[place]
            case _:
                other = draw(st.integers(0, len(members) - 1))
                members[place], members[other] = (name, members[other][1]), (members[other][0], values)
    return one, utf8(braced((name, braced(values.items())) for name, values in members))


@whatever
@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    read(data)
    read(with_header(b"{" + data))
    outcome(lambda: parse_config(data), BYTES_ANYWAY)


@whatever
@given(objects_of(names, entries | anything), st.integers(0, 64), st.none() | st.integers(0, 2**64 - 1))
def test_any_header(header: str, body_bytes: int, length: int | None) -> None:
    read(with_header(utf8(header), bytes(body_bytes), length))


@whatever
@given(changed_headers(), st.integers(-40, 40))
def test_a_good_header_that_was_changed(changed: tuple[Good, bytes], more: int) -> None:
    """What is still read is matched with a good configuration, which it may not fit."""
    one, header = changed
    body = one.body[:more] if more < 0 else one.body + bytes(more)
    found = read(with_header(header, body))
    if found is not None:
        config = parse_config(json.dumps(one.config).encode())
        outcome(lambda: make_plan(config, contents_of(found, BASE), BASE, RANK), BYTES_ANYWAY)


@whatever
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4))
def test_a_good_file_with_other_bytes(one: Good, changes: list[tuple[float, int]]) -> None:
    data = bytearray(one.file)
    for place, value in changes:
        data[int(place * one.header_bytes)] = value
    read(bytes(data))


@pytest.mark.parametrize("unit", ["[],", "{},", '"",', "[0],", '{"a":[]},'])
def test_a_header_full_of_one_thing_takes_bounded_memory(unit: str) -> None:
    filler = (unit * (MAX_HEADER_BYTES // len(unit) - 10))[:-1]
    assert read(with_header(b'{"a":[%s]}' % filler.encode())) is None


@pytest.mark.parametrize("key", ["\U0001f600%d", "model.layers.%d.lora_A.weight"])
def test_a_header_full_of_tensors_takes_bounded_memory(key: str) -> None:
    member = '"%s":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    count = MAX_HEADER_BYTES // (len(utf8(member)) + len(utf8(key)) + 6)
    header = "{" + ",".join(member % (key % i) for i in range(count)) + "}"
    found = read(with_header(utf8(header)))
    assert found is not None
    assert len(found.entries) == count
    config = parse_config(json.dumps(make_config()).encode())
    assert outcome(lambda: make_plan(config, contents_of(found, BASE), BASE, RANK), 16 * len(header)) is None


# The configuration.

CONFIG_KEYS = [
    *make_config(rank_pattern={}, alpha_pattern={}, use_rslora=False, exclude_modules=None),
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
    "bias",
    "base_model_name_or_path",
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "ensure_weight_tying",
    "lora_dropout",
    "of_a_later_peft",
]
PIECES = r"""
    \d \w \b \Z \1 \. \x41 \u0041 \p{L} \N{DASH} [[:alpha:]] [a-z] [^.] *+ ?? .* .*? \d+
    {2} {0,40} {1,} {99} {e<=1} (?i) (?: (?= (?<= (?P<n> (?P=n) (?(n) (?> (?| (?R) (?1)
    layers model q_proj self_attn mlp
"""
pieces = st.sampled_from([*"().*+?|[]{}^$\\-,:=!<>&~#019aZ_ é\ud800\U0001f600", *PIECES.split()])
patterns = st.lists(pieces, max_size=24).map("".join) | st.text(max_size=40)
hostile_patterns = st.tuples(
    st.sampled_from(
        ["(.*)*", "(a|a)*", "(.|.)*", "(?:.*?.*?)*", "(?i)[^a]", "a?", "(a{9}){9}", "(?:", "[ab]"]
    ),
    st.integers(1, 500),
    st.sampled_from(["", "X", "(?=X)", "{100}", ")" * 20, "$"]),
).map(lambda t: t[0] * t[1] + t[2])
regexes = (patterns | hostile_patterns).map(json.dumps)
targets = (
    st.sampled_from(["q_proj", "down_proj", "self_attn.q_proj", "model.layers.0.mlp.up_proj", "", "."]).map(
        json.dumps
    )
    | regexes
)
small = st.integers(-1, 70_000).map(str)
values = {
    "r": small | anything,
    "lora_alpha": small | numbers,
    "target_modules": regexes | lists_of(targets) | st.just('"all-linear"') | anything,
    "exclude_modules": regexes | lists_of(targets) | anything,
    "rank_pattern": objects_of(regexes, small | numbers) | anything,
    "alpha_pattern": objects_of(regexes, small | numbers) | anything,
    "layers_to_transform": small | lists_of(small | numbers) | anything,
    "layers_pattern": regexes | lists_of(regexes) | anything,
    "bias": st.sampled_from(['"none"', '"lora_only"', '"all"', '"boft_only"']) | anything,
    "use_dora": st.sampled_from(["true", "false"]) | anything,
    "lora_bias": st.sampled_from(["true", "false"]) | anything,
    "modules_to_save": lists_of(targets | st.sampled_from(['"norm"', '"embed_tokens"'])) | anything,
    "ensure_weight_tying": st.sampled_from(["true", "false"]) | anything,
}


@st.composite
def changed_configs(draw: st.DrawFn) -> bytes:
    """A good configuration in which a few keys have other values, or there are more of them."""
    one = draw(st.sampled_from(GOOD))
    texts = [(json.dumps(key), json.dumps(value)) for key, value in one.config.items()]
    keys = draw(
        st.lists(st.sampled_from(CONFIG_KEYS) | st.sampled_from(list(values)), min_size=1, max_size=4)
    )
    for key in keys:
        if draw(st.booleans()) or draw(st.booleans()):
            texts = [text for text in texts if text[0] != json.dumps(key)]
        texts.append((json.dumps(key), draw(values.get(key, anything))))
    return utf8(braced(texts))


NAMES = [
    f"{root}layers.{layer}.{module}"
    for root in ("model.", "")
    for layer in (0, 11)
    for module in ("self_attn.q_proj", "mlp.down_proj")
]


def apply(data: bytes, header: SafetensorsHeader) -> None:
    """Reads a configuration, asks it of modules, and matches it with good weights, which it may not fit."""
    config = parse_config(data)
    matcher = ModuleMatcher(config)
    for name in NAMES:
        matcher.is_target(name)
        assert matcher.rank(name) >= 1
        assert isinstance(matcher.scale(name), float)
    make_plan(config, contents_of(header, BASE), BASE, RANK)


def check_config(data: bytes) -> None:
    expanded = min(MAX_EXPANDED_LENGTH, 1000 * len(data))
    max_bytes = BYTES_ANYWAY + BYTES_PER_BYTE * len(data) + BYTES_PER_PATTERN_BYTE * expanded
    for header in GOOD_HEADERS:
        outcome(partial(apply, data, header), max_bytes)


@whatever
@given(changed_configs())
@example(b'{"peft_type":"LORA","target_modules":"(?<\\ud800a)"}')
@example(b'{"peft_type":"LORA","rank_pattern":{"(?P<%s>a)(?P<%s>a)":1}}' % (b"a" * 1500, b"a" * 1500))
@example(b'{"peft_type":"LORA","target_modules":"(?:%s){1000}"}' % (b"a?" * 2000))
def test_a_good_config_that_was_changed(data: bytes) -> None:
    check_config(data)


@whatever
@given(objects_of(st.sampled_from([*CONFIG_KEYS, *values]).map(json.dumps) | strings, anything | regexes, 12))
def test_any_config(text: str) -> None:
    check_config(utf8(text.replace("{", '{"peft_type":"LORA",', 1)))


@pytest.mark.parametrize("unit", ["[],", "{},", "0,", '"",', "1.5,", '"q_proj",'])
@pytest.mark.parametrize(
    "key", ["target_modules", "layers_to_transform", "modules_to_save", "of_a_later_peft"]
)
def test_a_config_full_of_one_thing_takes_bounded_memory(key: str, unit: str) -> None:
    filler = (unit * ((MAX_CONFIG_BYTES - 100) // len(unit)))[:-1]
    check_config(b'{"peft_type":"LORA","%s":[%s]}' % (key.encode(), filler.encode()))


@pytest.mark.parametrize("levels", [*range(900, 1000, 7), 10_000, 400_000])
@pytest.mark.parametrize("key", ["of_a_later_peft", "bias", "r", "target_modules"])
def test_a_config_of_many_levels_is_refused(key: str, levels: int) -> None:
    data = b'{"peft_type":"LORA","%s":%s%s}' % (key.encode(), b"[" * levels, b"]" * levels)
    with pytest.raises(InvalidArgumentError):
        parse_config(data)


@pytest.mark.parametrize(
    "piece", ["(?:a?a?a?a?){1000}", "a{999}", "(.*)*X", "(?i)[\\u0000-\\uffff]", "(a|b)"]
)
def test_a_config_full_of_patterns_takes_bounded_memory(piece: str) -> None:
    """As many as there may be, each another one."""
    table = braced((f'"{piece}{i}"', "1") for i in range(4096))
    check_config(utf8(braced([('"peft_type"', '"LORA"'), ('"rank_pattern"', table)])))


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "(?:" + "a?" * 70 + "){1000}"},
        {"exclude_modules": "x" * 4000 + "{33}"},
        {"rank_pattern": {f"(?:a?){{999}}{i}": 1 for i in range(20)}},
    ],
)
def test_patterns_that_are_long_when_expanded_are_refused_before_that(changes: dict[str, Any]) -> None:
    config = parse_config(json.dumps(make_config(**changes)).encode())
    with pytest.raises(InvalidArgumentError, match=f"{MAX_EXPANDED_LENGTH} characters times repetitions"):
        ModuleMatcher(config)


def test_a_value_of_any_depth_may_be_in_a_message() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "a list of many levels"
