"""Logs: structlog for our own events, and the standard library's records of others through the same door.

No renderer here shows local variables of a traceback: they hold prompts.
"""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from deltaplane_server.config import LogFormat

_CHATTY = (
    "asyncio",
    "botocore",
    "filelock",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "transformers",
    "urllib3",
)
"""Libraries whose news are of no use to who runs a server, or show signed URLs; their warnings are."""

_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def setup_logging(log_format: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Sends all logs of this process to `stream` (default: stdout), from `level` on.

    level: "debug", "info", "warning" or "error".
    """
    stream = stream or sys.stdout
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log_formatter(log_format, colors=stream.isatty()))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def log_formatter(log_format: LogFormat, *, colors: bool) -> logging.Formatter:
    """Renders records of structlog and of the standard library alike, one line each but for tracebacks."""
    renderers: list[Processor]
    if log_format is LogFormat.JSON:
        renderers = [
            structlog.processors.EventRenamer("message"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        renderers = [
            structlog.dev.ConsoleRenderer(
                colors=colors, exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
