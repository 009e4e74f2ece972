"""A bucket in this process that answers signed URLs as S3 does: signatures are computed anew and compared."""

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

import pytest

from http_host import Asked, Fault, HttpHost, http_host, status

KEY_ID, SECRET, REGION = "AKIATEST", "a/secret+key", "eu-north-1"


@dataclass(frozen=True)
class S3Host:
    """Made by s3_host(). host: with the bucket as the first segment of its paths."""

    host: HttpHost

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self.host.files[quote(f"/{bucket}/{key}")] = content


@contextmanager
def s3_host(patch: pytest.MonkeyPatch) -> Iterator[S3Host]:
    """What the AWS environment of this process leads to meanwhile."""
    with http_host() as host:
        host.check = lambda asked: _refusal(host, asked)
        for name, value in {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": host.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        }.items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        yield S3Host(host)


def _refusal(host: HttpHost, asked: Asked) -> Fault | None:
    url = urlsplit(asked.path)
    query = dict(parse_qsl(url.query, strict_parsing=True)) if url.query else {}
    signature = query.pop("X-Amz-Signature", "")
    if not signature:
        return _error(403, "AccessDenied")
    if signature != _signature(url.path, query, asked.headers["host"]):
        return _error(403, "SignatureDoesNotMatch")
    return None if url.path in host.files else _error(404, "NoSuchKey")


def _signature(path: str, query: dict[str, str], host: str) -> str:
    """Of AWS Signature Version 4, for a GET whose parameters carry it."""
    key_id, *scope = query["X-Amz-Credential"].split("/")
    canonical_query = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(query.items()))
    canonical = f"GET\n{path}\n{canonical_query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join(("AWS4-HMAC-SHA256", query["X-Amz-Date"], "/".join(scope), digest))
    key = f"AWS4{SECRET}".encode()
    for part in (*scope, to_sign):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex() if key_id == KEY_ID and scope[1:] == [REGION, "s3", "aws4_request"] else "of another key"


def _error(code: int, name: str) -> Fault:
    return status(code, f"<?xml version='1.0'?><Error><Code>{name}</Code></Error>".encode())
