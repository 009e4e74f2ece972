"""The Python clients against a real gRPC server whose two services answer what a test tells them to."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from deltaplane import AsyncClient, ChannelConfig, Client, RetryPolicy, errors
from deltaplane.v1 import adapters_pb2, generation_pb2
from scripted_server import Script, Status, reason, retry_in, serving, status

QUICK = RetryPolicy(max_attempts=3, initial_backoff=0.0, max_backoff=0.05)


DRAINING = status(grpc.StatusCode.UNAVAILABLE, "draining", reason("DRAINING"), retry_in(0.01))
BARE_UNAVAILABLE = status(grpc.StatusCode.UNAVAILABLE, "connection reset")


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script, healthy=False) as address:
        yield address


class Face:
    """One of the two clients, driven from a test that knows no difference between them."""

    def __init__(self, kind: str, address: str, retry: RetryPolicy | None = None) -> None:
        self._kind = kind
        self._address = address
        self._retry = retry
        self._channel = ChannelConfig(metadata=[("authorization", "Bearer x")])

    def call(
        self, blocking: Callable[[Client], object], asynchronous: Callable[[AsyncClient], Awaitable[object]]
    ) -> object:
        if self._kind == "blocking":
            with Client(self._address, self._address, retry=self._retry, channel=self._channel) as client:
                return blocking(client)

        async def run() -> object:
            async with AsyncClient(
                self._address, self._address, retry=self._retry, channel=self._channel
            ) as client:
                return await asynchronous(client)

        return asyncio.run(run())

    def texts(self, timeout: float | None = None) -> list[str]:
        """The texts of a generation's deltas, one by one."""

        async def asynchronous(client: AsyncClient) -> list[str]:
            return [delta.text async for delta in client.generate("Hi", timeout=timeout)]

        texts = self.call(
            lambda client: [delta.text for delta in client.generate("Hi", timeout=timeout)], asynchronous
        )
        assert isinstance(texts, list)
        return texts


Faces = Callable[[RetryPolicy | None], Face]


@pytest.fixture(params=["blocking", "asyncio"])
def face(request: pytest.FixtureRequest, address: str) -> Faces:
    return lambda retry: Face(request.param, address, retry)


def delta(text: str, **fields: object) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(request_id="r", text=text, **fields)  # type: ignore[arg-type]


def test_a_stream_gives_its_deltas_and_sends_the_metadata(face: Faces, script: Script) -> None:
    script.answers = [[delta("a"), delta("b")]]
    assert face(None).texts() == ["a", "b"]
    assert script.metadata[0]["authorization"] == "Bearer x"


def test_a_completion_adds_up(face: Faces, script: Script) -> None:
    length = generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_LENGTH)
    script.answers = [
        [
            delta("He", token_ids=[1]),
            delta("x", token_ids=[9], output_index=1),
            delta("llo", token_ids=[2, 3], finish=length),
            delta("", output_index=1, finish=length, usage=generation_pb2.Usage(completion_tokens=4)),
        ]
    ]
    completion = face(None).call(lambda c: c.complete("Hi", n=2), lambda c: c.complete("Hi", n=2))
    assert completion.text == "Hello"  # type: ignore[attr-defined]
    assert completion.outputs[0].token_ids == [1, 2, 3]  # type: ignore[attr-defined]
    assert completion.outputs[1].finish == length  # type: ignore[attr-defined]
    assert completion.outputs[1].finish_reason == "length"  # type: ignore[attr-defined]
    assert completion.usage.completion_tokens == 4  # type: ignore[attr-defined]
    assert completion.request_id == "r"  # type: ignore[attr-defined]


def test_generate_text_is_the_first_output(face: Faces, script: Script) -> None:
    script.answers = [[delta("x", output_index=1), delta("Hello")]]
    assert face(None).call(lambda c: c.generate_text("Hi"), lambda c: c.generate_text("Hi")) == "Hello"


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.NOT_FOUND, errors.NotFoundError),
        (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExistsError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPreconditionError),
        (grpc.StatusCode.ABORTED, errors.AbortedError),
        (grpc.StatusCode.OUT_OF_RANGE, errors.OutOfRangeError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnimplementedError),
        (grpc.StatusCode.INTERNAL, errors.InternalError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, errors.CallCancelledError),
        (grpc.StatusCode.PERMISSION_DENIED, errors.DeltaplaneError),
    ],
)
def test_each_status_has_its_error(
    face: Faces, script: Script, code: grpc.StatusCode, cls: type[errors.DeltaplaneError]
) -> None:
    script.answers = [[status(code, "so it is", reason("WHY", adapter="a"))]]
    with pytest.raises(cls) as caught:
        face(None).call(lambda c: c.adapters.get("a"), lambda c: c.adapters.get("a"))
    assert type(caught.value) is cls
    assert (caught.value.code, str(caught.value), caught.value.reason) == (code, "so it is", "WHY")
    assert caught.value.metadata == {"adapter": "a"}


def test_field_violations_arrive(face: Faces, script: Script) -> None:
    violations = error_details_pb2.BadRequest(
        field_violations=[
            {"field": "sampling.top_p", "description": "2 is above 1"},
            {"field": "stop.max_tokens", "description": "0 is below 1"},
        ]
    )
    script.answers = [
        [status(grpc.StatusCode.INVALID_ARGUMENT, "two things", reason("INVALID_ARGUMENT"), violations)]
    ]
    with pytest.raises(errors.InvalidArgumentError) as caught:
        face(None).texts()
    assert caught.value.violations == (
        errors.FieldViolation("sampling.top_p", "2 is above 1"),
        errors.FieldViolation("stop.max_tokens", "0 is below 1"),
    )


def test_retry_info_arrives(face: Faces, script: Script) -> None:
    script.answers = [
        [status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason("QUEUE_FULL"), retry_in(2.5))]
    ]
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        face(None).texts()
    assert caught.value.retry_after == 2.5


def test_details_that_cannot_be_read_leave_code_and_message(face: Faces, script: Script) -> None:
    garbled = (("grpc-status-details-bin", b"\xff\xff\xff"),)
    script.answers = [[Status(grpc.StatusCode.NOT_FOUND, "gone", garbled)]]
    with pytest.raises(errors.NotFoundError, match="gone"):
        face(None).texts()


def test_nobody_there_is_told_with_the_address() -> None:
    with pytest.raises(errors.UnavailableError, match=r"^no answer from 127\.0\.0\.1:1: "):
        Face("blocking", "127.0.0.1:1").texts()
    with pytest.raises(errors.UnavailableError, match=r"^no answer from 127\.0\.0\.1:1: "):
        Face("asyncio", "127.0.0.1:1").texts()


def test_a_refused_stream_is_tried_again(face: Faces, script: Script) -> None:
    script.answers = [[DRAINING], [BARE_UNAVAILABLE], [delta("a"), delta("b")]]
    assert face(QUICK).texts() == ["a", "b"]
    assert len(script.seen) == 3


def test_a_stream_is_never_tried_again_after_a_message(face: Faces, script: Script) -> None:
    script.answers = [[delta("a"), DRAINING], [delta("a"), delta("b")]]
    with pytest.raises(errors.UnavailableError):
        face(QUICK).texts()
    assert len(script.seen) == 1


def test_without_a_policy_nothing_is_tried_again(face: Faces, script: Script) -> None:
    script.answers = [[DRAINING], [delta("a")]]
    with pytest.raises(errors.UnavailableError):
        face(None).texts()
    assert len(script.seen) == 1


def test_reads_are_tried_again_whoever_failed_them(face: Faces, script: Script) -> None:
    script.answers = [[BARE_UNAVAILABLE], [adapters_pb2.Adapter(name="a")]]
    adapter = face(QUICK).call(lambda c: c.adapters.get("a"), lambda c: c.adapters.get("a"))
    assert adapter == adapters_pb2.Adapter(name="a")


def test_a_change_is_tried_again_only_where_the_server_refused_it(face: Faces, script: Script) -> None:
    def roll_back() -> object:
        return face(QUICK).call(lambda c: c.adapters.rollback("a"), lambda c: c.adapters.rollback("a"))

    script.answers = [[DRAINING], [adapters_pb2.Adapter(name="a")]]
    assert roll_back() == adapters_pb2.Adapter(name="a")
    script.answers = [[BARE_UNAVAILABLE], [adapters_pb2.Adapter(name="a")]]
    with pytest.raises(errors.UnavailableError):
        roll_back()


def test_a_change_with_a_key_is_tried_again_whoever_failed_it(face: Faces, script: Script) -> None:
    key = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
    script.answers = [[BARE_UNAVAILABLE], [adapters_pb2.Adapter(name="a")]]
    adapter = face(QUICK).call(
        lambda c: c.adapters.evict("a", idempotency_key=key),
        lambda c: c.adapters.evict("a", idempotency_key=key),
    )
    assert adapter == adapters_pb2.Adapter(name="a")
    assert script.seen[0] == script.seen[1]


def test_a_timeout_holds_over_all_tries(face: Faces, script: Script) -> None:
    script.answers = [[None]]
    with pytest.raises(errors.DeadlineExceededError):
        face(QUICK).texts(timeout=0.2)
    script.answers = [[status(grpc.StatusCode.UNAVAILABLE, "draining", retry_in(30.0))]]
    patient = RetryPolicy(max_backoff=60.0)
    with pytest.raises(errors.UnavailableError):
        face(patient).texts(timeout=5.0)


def test_leaving_a_stream_ends_the_call(face: Faces, script: Script) -> None:
    script.answers = [[delta("a"), None]]

    def blocking(client: Client) -> list[str]:
        with client.generate("Hi") as stream:
            first = next(stream).text
        assert list(stream) == []
        return [first]

    async def asynchronous(client: AsyncClient) -> list[str]:
        async with client.generate("Hi") as stream:
            first = (await anext(stream)).text
        assert [delta async for delta in stream] == []
        return [first]

    assert face(None).call(blocking, asynchronous) == ["a"]
    assert script.cancelled.wait(10)


def test_cancel_from_another_thread_stops_the_iteration(script: Script, address: str) -> None:
    script.answers = [[delta("a"), None]]
    with Client(address, address) as client:
        stream = client.generate("Hi")
        assert next(stream).text == "a"
        threading.Timer(0.05, stream.cancel).start()
        assert list(stream) == []


async def test_a_cancelled_task_ends_the_call(script: Script, address: str) -> None:
    script.answers = [[delta("a"), None]]
    arrived = asyncio.Event()

    async def read(client: AsyncClient) -> None:
        async for _ in client.generate("Hi"):
            arrived.set()

    async with AsyncClient(address, address) as client:
        task = asyncio.create_task(read(client))
        await asyncio.wait_for(arrived.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(script.cancelled.wait, 10)


def test_lists_go_over_all_pages(face: Faces, script: Script) -> None:
    page = adapters_pb2.ListAdaptersResponse
    script.answers = [
        [page(adapters=[adapters_pb2.Adapter(name="a")], next_page_token="t")],
        [page(adapters=[adapters_pb2.Adapter(name="b")])],
    ]

    async def asynchronous(client: AsyncClient) -> list[str]:
        return [adapter.name async for adapter in client.adapters.list("state=HOST", page_size=1)]

    names = face(None).call(
        lambda client: [adapter.name for adapter in client.adapters.list("state=HOST", page_size=1)],
        asynchronous,
    )
    assert names == ["a", "b"]
    assert script.seen[1] == adapters_pb2.ListAdaptersRequest(
        filter="state=HOST", page_size=1, page_token="t"
    )


ADMIN_CALLS: list[tuple[str, tuple[object, ...], dict[str, object], Message, Message]] = [
    (
        "register",
        ("a", "/adapters/a"),
        {"labels": {"team": "x"}, "load_tier": "host", "validate_only": True, "return_immediately": True},
        adapters_pb2.RegisterAdapterRequest(
            name="a",
            source="/adapters/a",
            labels={"team": "x"},
            load_tier=adapters_pb2.ADAPTER_TIER_HOST,
            validate_only=True,
            return_immediately=True,
        ),
        adapters_pb2.Adapter(name="a"),
    ),
    (
        "update",
        ("a",),
        {"source": "/adapters/b", "etag": "e", "keep_previous": True, "return_immediately": True},
        adapters_pb2.UpdateAdapterRequest(
            adapter=adapters_pb2.Adapter(name="a", source="/adapters/b"),
            update_mask=FieldMask(paths=["source"]),
            etag="e",
            keep_previous=True,
            return_immediately=True,
        ),
        adapters_pb2.Adapter(name="a", version=2),
    ),
    (
        "delete",
        ("a",),
        {"drain_timeout": 0, "force": True, "wait_until_gone": True, "idempotency_key": "k"},
        adapters_pb2.DeleteAdapterRequest(
            name="a",
            drain_timeout=Duration(seconds=0),
            force=True,
            wait_until_gone=True,
            idempotency_key="k",
        ),
        adapters_pb2.Adapter(name="a"),
    ),
    (
        "load",
        ("a",),
        {"version": 2},
        adapters_pb2.LoadAdapterRequest(name="a", tier=adapters_pb2.ADAPTER_TIER_DEVICE, version=2),
        adapters_pb2.Adapter(name="a"),
    ),
    (
        "evict",
        ("a", "host"),
        {"when_idle": True, "return_immediately": True},
        adapters_pb2.EvictAdapterRequest(
            name="a", tier=adapters_pb2.ADAPTER_TIER_HOST, when_idle=True, return_immediately=True
        ),
        adapters_pb2.Adapter(name="a"),
    ),
    (
        "pin",
        ("a",),
        {"return_immediately": True, "version": 1, "etag": "e"},
        adapters_pb2.PinAdapterRequest(
            name="a", tier=adapters_pb2.ADAPTER_TIER_DEVICE, return_immediately=True, version=1, etag="e"
        ),
        adapters_pb2.Adapter(name="a"),
    ),
    (
        "unpin",
        ("a", "host"),
        {"version": 1, "validate_only": True},
        adapters_pb2.UnpinAdapterRequest(
            name="a", tier=adapters_pb2.ADAPTER_TIER_HOST, version=1, validate_only=True
        ),
        adapters_pb2.Adapter(name="a"),
    ),
    (
        "rollback",
        ("a", 0),
        {"validate_only": True},
        adapters_pb2.RollbackAdapterRequest(name="a", version=0, validate_only=True),
        adapters_pb2.Adapter(name="a"),
    ),
    (
        "capacity",
        ([8, 16],),
        {},
        adapters_pb2.GetCapacityRequest(ranks=[8, 16]),
        adapters_pb2.Capacity(slots=4),
    ),
]


@pytest.mark.parametrize(
    ("method", "arguments", "options", "request_sent", "answer"), ADMIN_CALLS, ids=[c[0] for c in ADMIN_CALLS]
)
def test_admin_calls_send_their_request(
    face: Faces,
    script: Script,
    method: str,
    arguments: tuple[object, ...],
    options: dict[str, object],
    request_sent: Message,
    answer: Message,
) -> None:
    script.answers = [[answer]]
    got = face(None).call(
        lambda client: getattr(client.adapters, method)(*arguments, **options),
        lambda client: getattr(client.adapters, method)(*arguments, **options),
    )
    assert got == answer
    assert script.seen == [request_sent]


def test_slots_and_watch(face: Faces, script: Script) -> None:
    script.answers = [
        [adapters_pb2.ListSlotsResponse(slots=[adapters_pb2.Slot(adapter="a"), adapters_pb2.Slot(slot=1)])]
    ]
    slots = face(None).call(lambda c: c.adapters.slots(), lambda c: c.adapters.slots())
    assert [slot.adapter for slot in slots] == ["a", ""]  # type: ignore[attr-defined]

    event = adapters_pb2.WatchAdaptersResponse(type=adapters_pb2.ADAPTER_EVENT_TYPE_LOADED, resume_token="t")
    script.answers = [[event]]

    async def asynchronous(client: AsyncClient) -> list[Message]:
        return [event async for event in client.adapters.watch(resume_token="s")]

    events = face(None).call(lambda c: list(c.adapters.watch(resume_token="s")), asynchronous)
    assert events == [event]
    assert script.seen[-1] == adapters_pb2.WatchAdaptersRequest(resume_token="s")


def test_the_small_calls_of_the_data_plane(face: Faces, script: Script) -> None:
    script.answers = [
        [generation_pb2.Model(name="m")],
        [generation_pb2.TokenizeResponse(token_ids=[1, 2], text="Hi")],
        [generation_pb2.DetokenizeResponse(text="Hi")],
        [generation_pb2.AbortResponse(aborted=True)],
    ]
    assert face(None).call(lambda c: c.model(), lambda c: c.model()) == generation_pb2.Model(name="m")
    tokens = face(None).call(
        lambda c: c.tokenize("Hi", add_special_tokens=False),
        lambda c: c.tokenize("Hi", add_special_tokens=False),
    )
    assert list(tokens.token_ids) == [1, 2]  # type: ignore[attr-defined]
    assert face(None).call(lambda c: c.detokenize([1, 2]), lambda c: c.detokenize([1, 2])) == "Hi"
    assert face(None).call(lambda c: c.abort("r"), lambda c: c.abort("r")) is True
    assert script.seen[1] == generation_pb2.TokenizeRequest(text="Hi", add_special_tokens=False)


def test_health_of_both_planes(face: Faces) -> None:
    assert face(None).call(lambda c: c.is_serving(), lambda c: c.is_serving()) is False
    assert face(None).call(lambda c: c.adapters.is_serving(), lambda c: c.adapters.is_serving()) is False
