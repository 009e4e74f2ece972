"""Errors that nobody foresaw."""

import traceback
import uuid

import structlog

from deltaplane_controlplane.errors import InternalError

_log = structlog.get_logger(__name__)


def unforeseen(error: BaseException, what: str) -> InternalError:
    """Logs an error that nobody foresaw, and answers the one to send: it has an id, under which the log has
    the rest.

    Its frames are logged without their variables, which may hold a prompt. what: the call that it ended.
    """
    error_id = uuid.uuid4().hex
    _log.error(
        "rpc.failed",
        method=what,
        error_id=error_id,
        error=type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
    )
    return InternalError(
        f"internal error; the server's log tells more under error_id {error_id}",
        metadata={"error_id": error_id},
    )
