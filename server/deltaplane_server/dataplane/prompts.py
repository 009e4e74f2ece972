"""Turns prompts into token ids and token ids into text, off the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from deltaplane.v1 import generation_pb2 as pb
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.dataplane.limits import RequestLimits
from deltaplane_server.dataplane.tokenizer import Tokenizer
from deltaplane_server.dataplane.validation import check_prompt, check_prompt_length, check_token_ids
from deltaplane_server.dataplane.violations import Violations

_THREADS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids and the text they came from."""

    token_ids: Sequence[int]
    text: str


class Prompts:
    """Tokenises in threads of its own, and refuses before it does what cannot fit the model."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def token_ids(self, request: pb.GenerateRequest, found: Violations) -> Sequence[int]:
        """The prompt of a request as token ids, truncated as it asks; adds what is wrong to `found`."""
        form = Violations()
        check_prompt(request, self._limits, form)
        if form:
            found.extend(form)
            return ()
        if request.WhichOneof("prompt") == "token_ids":
            field, ids = "token_ids.ids", self._given_ids(request, found)
        else:
            field = "text" if request.WhichOneof("prompt") == "text" else "messages"
            try:
                ids = (await self._tokenized(request, field)).token_ids
            except InvalidArgumentError as error:
                found.extend(error.violations)
                return ()
        if request.HasField("truncate_prompt_tokens"):
            ids = ids[-request.truncate_prompt_tokens :]
        check_prompt_length(field, len(ids), self._limits, found)
        return ids

    async def tokenize_text(self, text: str, *, add_special_tokens: bool) -> TokenizedText:
        """Token ids of a text."""
        return await self._in_thread(self._encode, text, add_special_tokens)

    async def tokenize_messages(self, messages: pb.ChatMessages) -> TokenizedText:
        """Token ids of a conversation, and the text that the model's template makes of it.

        Errors: InvalidArgumentError, where the template refuses it.
        """
        return await self._in_thread(lambda: self._encode(self._render(messages), False))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._in_thread(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def _given_ids(self, request: pb.GenerateRequest, found: Violations) -> Sequence[int]:
        given = request.token_ids.ids
        if len(given) > self._limits.max_prompt_tokens and not request.HasField("truncate_prompt_tokens"):
            return given  # to be refused for its length alone
        ids = list(given)
        check_token_ids("token_ids.ids", ids, self._limits, found)
        return ids

    async def _tokenized(self, request: pb.GenerateRequest, field: str) -> TokenizedText:
        bounded = not request.HasField("truncate_prompt_tokens")

        def tokenize() -> TokenizedText:
            text = request.text if field == "text" else self._render(request.messages)
            if bounded:
                self._refuse_if_it_cannot_fit(field, text)
            return self._encode(text, add_special_tokens=field == "text")

        return await self._in_thread(tokenize)

    def _render(self, messages: pb.ChatMessages) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages.messages]
        opens_turn = messages.add_generation_prompt if messages.HasField("add_generation_prompt") else True
        return self._tokenizer.render(turns, add_generation_prompt=opens_turn)

    def _encode(self, text: str, add_special_tokens: bool) -> TokenizedText:
        return TokenizedText(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), text)

    def _refuse_if_it_cannot_fit(self, field: str, text: str) -> None:
        """A text of more bytes than the longest prompt of the longest tokens need not be tokenised."""
        limit = self._limits.max_prompt_tokens * self._tokenizer.max_token_bytes
        if (nbytes := len(text.encode())) > limit:
            raise InvalidArgumentError.for_field(
                field,
                f"the prompt has {nbytes} bytes, and the {self._limits.max_prompt_tokens} tokens that it may "
                f"have hold at most {limit}; shorten it or set truncate_prompt_tokens",
            )

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
