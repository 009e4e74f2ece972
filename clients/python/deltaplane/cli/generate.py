"""deltactl generate: the base model, an adapter or a sum of several as plain text, or more side by side."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from deltaplane.cli import arguments as kinds
from deltaplane.cli import connection, show
from deltaplane.cli.arguments import Add
from deltaplane.cli.side_by_side import Pane, shown
from deltaplane.cli.tables import show_usage
from deltaplane.completion import Completion
from deltaplane.errors import DeltaplaneError
from deltaplane.requests import GenerateOptions, Prompt
from deltaplane.v1.generation_pb2 import GenerateResponse

BASE = "base model"


def add_command(add: Add) -> None:
    """Adds `deltactl generate`."""
    parser = add("generate", "generate from the base model or from adapters, side by side", generate)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    models = parser.add_argument_group("who answers (default: the base model)")
    models.add_argument(
        "--adapter",
        dest="who",
        type=kinds.adapters,
        action="append",
        default=[],
        metavar="NAME",
        help="an adapter, or several that are added up, such as legal:0.7+story:0.3; may be given again",
    )
    models.add_argument("--base", action="store_true", help="the base model too, beside the adapters")
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("--chat", action="store_true", help="send PROMPT as a user's turn of a chat")
    prompt.add_argument("--system", metavar="TEXT", help="the system's turn before it; means --chat")
    _add_options(parser.add_argument_group("how it is generated (defaults: the server's)"))
    parser.add_argument("--stats", action="store_true", help="print what each request cost")


def _add_options(group: "argparse._ArgumentGroup") -> None:
    """Options whose `dest` is that of GenerateOptions."""
    for name, kind, text in (
        ("max-tokens", int, "the most tokens of one output"),
        ("min-tokens", int, "end-of-sequence and stops count only from this many tokens on"),
        ("temperature", float, "0 is greedy"),
        ("top-k", int, "draw from this many of the likeliest tokens"),
        ("top-p", float, "draw from the likeliest tokens that reach this probability together"),
        ("min-p", float, "draw from tokens of at least this share of the likeliest one's probability"),
        ("repetition-penalty", float, "above 1 discourages tokens of prompt and output"),
        ("presence-penalty", float, "above 0 discourages tokens of the output, once each"),
        ("frequency-penalty", float, "above 0 discourages tokens of the output, each time"),
        ("seed", int, "makes the draw repeatable"),
        ("n", int, "how many outputs"),
        ("logprobs", int, "log-probabilities of this many of the likeliest tokens; shown with --json"),
        ("priority", int, "higher is scheduled first"),
        ("truncate-prompt-tokens", int, "keep only this many of the prompt's last tokens"),
    ):
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--tenant", metavar="NAME", help="the queue that the request is counted in")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends it; may be given again"
    )
    group.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        action="append",
        metavar="ID",
        help="likewise a token",
    )
    group.add_argument("--include-stop", action="store_true", default=None, help="keep the stop text")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past end-of-sequence")


@dataclass
class Stream:
    """One request under way.

    adapter: who answers, as the command line says; the base model where that is empty.
    weights: of several adapters that are added up.
    """

    adapter: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    completion: Completion = field(default_factory=Completion)
    error: DeltaplaneError | None = None

    @property
    def title(self) -> str:
        return self.adapter or BASE


def generate(arguments: argparse.Namespace) -> int:
    """Exit code 1 when any of the streams failed; the others go on to their end."""
    streams = [Stream(*who) for who in dict(arguments.who).items()]
    if arguments.base or not streams:
        streams.insert(0, Stream())
    asyncio.run(_generate(arguments, streams))
    if arguments.stats and not arguments.json:
        print()
        show_usage((stream.title, stream.completion.usage) for stream in streams if stream.completion.usage)
    failed = False
    for stream in streams:
        if stream.error:
            failed = True
            show.print_error(stream.error, source=stream.title if len(streams) > 1 else "")
    return 1 if failed else 0


async def _generate(arguments: argparse.Namespace, streams: Sequence[Stream]) -> None:
    options = cast(
        GenerateOptions,
        {name: value for name, value in vars(arguments).items() if name in GenerateOptions.__optional_keys__},
    )
    prompt = _prompt(arguments)
    async with connection.async_client(arguments) as client:
        with _display(arguments, streams) as display:

            async def run(stream: Stream) -> None:
                own = options.copy()
                if stream.weights:
                    own["adapters"] = stream.weights
                else:
                    own["adapter"] = stream.adapter
                try:
                    async for delta in client.generate(prompt, timeout=arguments.timeout, **own):
                        stream.completion.add(delta)
                        display.add(stream, delta)
                except DeltaplaneError as error:
                    stream.error = error
                    display.fail(stream)

            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(run(stream))


def _prompt(arguments: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.system is not None:
        return [{"role": "system", "content": arguments.system}, {"role": "user", "content": text}]
    return [{"role": "user", "content": text}] if arguments.chat else text


class Display(Protocol):
    """Shows streams while they run."""

    def add(self, stream: Stream, delta: GenerateResponse) -> None: ...
    def fail(self, stream: Stream) -> None: ...


@contextlib.contextmanager
def _display(arguments: argparse.Namespace, streams: Sequence[Stream]) -> Iterator[Display]:
    outputs = max(1, arguments.n or 1)
    if arguments.json:
        yield _JsonLines()
    elif len(streams) * outputs == 1:
        plain = _Plain()
        try:
            yield plain
        finally:
            plain.close()
    else:
        panes = _Panes(streams, outputs)
        with shown(panes.panes, columns=len(streams) * outputs):
            yield panes


class _JsonLines:
    """Each message as a line, with the adapter that it comes from."""

    def add(self, stream: Stream, delta: GenerateResponse) -> None:
        show.print_json({"adapter": stream.adapter, **show.as_json(delta)})

    def fail(self, stream: Stream) -> None:
        pass


class _Plain:
    """The text as it comes: as it is into a pipe or a file, without control characters onto a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last = "\n"

    def add(self, stream: Stream, delta: GenerateResponse) -> None:
        self._last = delta.text or self._last
        sys.stdout.write(show.printable(delta.text) if self._is_terminal else delta.text)
        sys.stdout.flush()

    def fail(self, stream: Stream) -> None:
        pass

    def close(self) -> None:
        """Ends the last line."""
        if not self._last.endswith("\n"):
            print(flush=True)


class _Panes:
    """A pane for each output of each stream, in that order; outputs after the first come with their text."""

    def __init__(self, streams: Sequence[Stream], outputs: int) -> None:
        self.panes: list[Pane] = []
        self._outputs = outputs
        self._order = {stream.title: place for place, stream in enumerate(streams)}
        self._by_output: dict[tuple[int, int], Pane] = {}
        for stream in streams:
            self._pane(stream, 0)

    def add(self, stream: Stream, delta: GenerateResponse) -> None:
        pane = self._pane(stream, delta.output_index)
        output = stream.completion.outputs[delta.output_index]
        pane.text = output.text
        pane.note = f"{len(output.token_ids)} tokens"
        if output.finish:
            pane.note += f", {output.finish_reason}"

    def fail(self, stream: Stream) -> None:
        for (place, _), pane in self._by_output.items():
            if place == self._order[stream.title]:
                pane.note, pane.failed = "failed", True

    def _pane(self, stream: Stream, index: int) -> Pane:
        key = (self._order[stream.title], index)
        if key not in self._by_output:
            self._by_output[key] = Pane(stream.title if self._outputs == 1 else f"{stream.title} {index}")
            self.panes[:] = [self._by_output[key] for key in sorted(self._by_output)]
        return self._by_output[key]
