"""Addresses of remote adapters: how they are taken apart, and that no spelling gets around a prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_server.adapters.remote.addresses import (
    AllowedSources,
    is_remote,
    parse_address,
    parse_prefix,
    parse_redirect,
    same_adapter,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("hf://org/name", "hf://org/name"),
        ("HF://org/name", "hf://org/name"),
        ("hf://org/Name_1.5-b/", "hf://org/Name_1.5-b"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("hf://org/name@refs/pr/1", "hf://org/name@refs/pr/1"),
        (f"hf://org/name@{COMMIT}", f"hf://org/name@{COMMIT}"),
        ("https://Models.Example.com/a/b", "https://models.example.com/a/b/"),
        ("https://models.example.com:443/a/", "https://models.example.com/a/"),
        ("https://models.example.com:0443/a/", "https://models.example.com/a/"),
        ("https://models.example.com:8443/a/", "https://models.example.com:8443/a/"),
        ("https://[2001:DB8:0::1]/a", "https://[2001:db8::1]/a/"),
        ("https://h/%61%20b/%C3%BC/", "https://h/a%20b/%C3%BC/"),
        ("https://h/a+b=c,(d)/", "https://h/a+b=c,(d)/"),
        ("http://127.0.0.1:80/a", "http://127.0.0.1/a/"),
        ("s3://my-bucket/a/b/", "s3://my-bucket/a/b"),
        ("s3://my.bucket.2/prefix with space/ü", "s3://my.bucket.2/prefix with space/ü"),
    ],
)
def test_an_address_is_written_in_one_way(text: str, written: str) -> None:
    address = parse_address(text)
    assert str(address) == written
    assert parse_address(written) == address


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ftp://host/a", "adapters come from hf://, https:// and s3://"),
        ("file:///etc/passwd", "adapters come from"),
        ("hf://", "hf://org/name"),
        ("hf://gpt2", "hf://org/name"),
        ("hf://org/name/more", "hf://org/name"),
        ("hf://org/..", "hf://org/name"),
        ("hf://org/a..b", "hf://org/name"),
        ("hf://org//name", "hf://org/name"),
        ("hf://org/na%6De", "hf://org/name"),
        ("hf://org/name@", "no branch, tag or commit"),
        ("hf://org/name@../../other", "no branch, tag or commit"),
        ("hf://org/name@a//b", "no branch, tag or commit"),
        ("hf://org/name@main?x=1", "no branch, tag or commit"),
        ("hf://org@main", "no branch, tag or commit"),
        ("https://", "no host"),
        ("https:///a", "no host"),
        ("https://host", "name the folder"),
        ("https://host/", "name the folder"),
        ("https://user:secret@host/a", "credentials do not belong"),
        ("https://user@host/a", "credentials do not belong"),
        ("https://host/a?token=x", "a query or a fragment"),
        ("https://host/a#b", "a query or a fragment"),
        ("https://host:99999/a", "no port"),
        ("https://host:0/a", "no port"),
        ("https://host:/a", "no host"),
        ("https://host:8a/a", "no host"),
        ("https://-host/a", "no host name"),
        ("https://host./a", "no host name"),
        ("https://ho_st/a", "no host"),
        ("https://hôst/a", "no host"),
        ("https://[::1/a", "no host"),
        ("https://[::g]/a", "no host"),
        ("https://[1::2::3]/a", "At most one '::' permitted"),
        ("https://host/a/../b", "has the segment '..'"),
        ("https://host/a/./b", "has the segment '.'"),
        ("https://host/a//b", "has the segment ''"),
        ("https://host//", "name the folder"),
        ("https://host/a//", "has the segment ''"),
        ("https://host/a/%2e%2e/b", "has the segment '..'"),
        ("https://host/a/.%2E/b", "has the segment '..'"),
        ("https://host/a/..%2fb", "has the segment '../b'"),
        ("https://host/a/%5c..", "has the segment"),
        ("https://host/a/%252e%252e/b", "has the segment '%2e%2e'"),
        ("https://host/a/..;/b", "has the segment '..;'"),
        ("https://host/a%00b", "has the segment"),
        ("https://host/a%0d%0ab", "has the segment"),
        ("https://host/%ff", "is not UTF-8"),
        ("https://host/%zz", "is not percent-encoded"),
        ("https://host/ü", "is not percent-encoded"),
        ("https://host\\@other/a", "characters that none may have"),
        ("https://host/a\nb", "characters that none may have"),
        ("s3://", "names no bucket"),
        ("s3://Bucket/a", "names no bucket"),
        ("s3://a..b/c", "names no bucket"),
        ("s3://key:secret@bucket/a", "names no bucket"),
        ("s3://bucket", "name the folder"),
        ("s3://bucket/../other/a", "has the segment '..'"),
        ("s3://bucket/a//b", "has the segment ''"),
        ("s3://bucket/a?versionId=1", "has the segment"),
        ("https://host/" + "a" * 2048, "at most 2048"),
    ],
)
def test_what_is_no_address_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_address(text)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "address"),
    [
        ("hf://", "hf://any/thing@at-all"),
        ("hf://my-org", "hf://my-org/a"),
        ("hf://my-org/", "hf://my-org/a@v1"),
        ("hf://my-org/a", "hf://my-org/a@v1"),
        ("hf://my-org/a@v1", "hf://my-org/a@v1"),
        ("https://h/", "https://h/a"),
        ("https://h/adapters", "https://h/adapters/a/b"),
        ("https://h/adapters/", "https://H:443/%61dapters/a"),
        ("https://h:8443/", "https://h:8443/a"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/a"),
        ("http://[::1]/", "http://[0:0::1]/a"),
        ("http://localhost/", "http://LOCALHOST:80/a"),
        ("s3://bucket", "s3://bucket/a"),
        ("s3://bucket/team/", "s3://bucket/team/a"),
    ],
)
def test_what_lies_under_a_prefix_is_allowed(prefix: str, address: str) -> None:
    allowed = AllowedSources([parse_prefix(prefix)])
    assert allowed.resolve(address) == parse_address(address)


@pytest.mark.parametrize(
    ("prefix", "address"),
    [
        ("hf://my-org", "hf://my-org-evil/a"),
        ("hf://my-org", "hf://My-Org/a"),
        ("hf://my-org/a", "hf://my-org/ab"),
        ("hf://my-org/a@v1", "hf://my-org/a"),
        ("hf://my-org/a@v1", "hf://my-org/a@v10"),
        ("https://h/", "https://h.evil.com/a"),
        ("https://h/", "https://evil.h/a"),
        ("https://h/", "https://h:8443/a"),
        ("https://h:8443/", "https://h/a"),
        ("https://h/", "http://h/a"),
        ("http://127.0.0.1/", "https://127.0.0.1/a"),
        ("http://127.0.0.1/", "http://127.0.0.2/a"),
        ("http://127.0.0.1/", "http://localhost/a"),
        ("https://127.0.0.1/", "https://0x7f.1/a"),
        ("https://h/adapters/", "https://h/adapters-evil/a"),
        ("https://h/adapters/", "https://h/Adapters/a"),
        ("s3://bucket/team/", "s3://bucket/teams/a"),
        ("s3://bucket", "s3://bucket2/a"),
        ("s3://bucket", "https://bucket/a"),
    ],
)
def test_what_only_looks_like_it_is_not(prefix: str, address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not an allowed source") as caught:
        AllowedSources([parse_prefix(prefix)]).resolve(address)
    assert caught.value.reason == "SOURCE_NOT_ALLOWED"
    assert str(parse_prefix(prefix)) in caught.value.message


@pytest.mark.parametrize(
    ("prefix", "told"),
    [
        ("https://", "no host"),
        ("s3://", "names no bucket"),
        ("http://models.example.com/", "for this machine alone"),
        ("http://127.0.0.1.example.com/", "for this machine alone"),
        ("http://10.0.0.1/", "for this machine alone"),
        ("/adapters", "adapters come from"),
        ("https://h/?x", "a query"),
    ],
)
def test_what_is_no_prefix_is_told(prefix: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_prefix(prefix)


def test_without_prefixes_nothing_is_allowed_and_the_flag_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="--adapter-sources"):
        AllowedSources().resolve("hf://org/name")


def test_a_malformed_source_is_an_error_of_its_field() -> None:
    with pytest.raises(InvalidArgumentError, match="no address of an adapter") as caught:
        AllowedSources([parse_prefix("hf://")]).resolve("hf://org")
    assert [violation.field for violation in caught.value.violations] == ["source"]


@pytest.mark.parametrize("path", ["/adapters/a", "adapters/a", "/a://b", "a", "", "://x", "1a://x", "."])
def test_a_path_is_no_address(path: str) -> None:
    assert not is_remote(path)


@pytest.mark.parametrize("source", ["hf://a/b", "ftp://x", "HTTPS://x", "x+y://z", "s3://"])
def test_any_scheme_is_one(source: str) -> None:
    assert is_remote(source)


def test_a_redirect_keeps_its_query() -> None:
    address, url = parse_redirect("https://CDN.example.com:443/a/file?sig=a%2Fb&x=1#part")
    assert str(address) == "https://cdn.example.com/a/file/"
    assert url == "https://cdn.example.com/a/file?sig=a%2Fb&x=1"


@pytest.mark.parametrize(
    "url",
    ["hf://org/name", "s3://bucket/a", "https://u@h/a", "https://h/../a", "https://h/a?ü", "//h/a", "/a"],
)
def test_what_is_no_redirect_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_redirect(url)


@pytest.mark.parametrize(
    ("asked", "known", "same"),
    [
        ("hf://o/n", f"hf://o/n@{COMMIT}", True),
        ("hf://o/n@main", f"hf://o/n@{COMMIT}", True),
        (f"hf://o/n@{COMMIT}", f"hf://o/n@{COMMIT}", True),
        (f"hf://o/n@{COMMIT[::-1]}", f"hf://o/n@{COMMIT}", False),
        ("hf://o/n", f"hf://o/m@{COMMIT}", False),
        ("https://h/a", "https://H:443/a/", True),
        ("https://h/a", "https://h/b/", False),
        ("https://h/a", "/folder", False),
    ],
)
def test_what_may_be_the_same_adapter(asked: str, known: str, same: bool) -> None:
    assert same_adapter(asked, known) is same


@given(
    st.text(alphabet="ab.%2eEfF/\\@:?#;h s3tp[]", max_size=40),
    st.sampled_from(["https://h/a/", "s3://abc/a", "hf://ab/"]),
)
def test_nothing_that_is_allowed_leaves_its_prefix(tail: str, prefix: str) -> None:
    """Whatever is written after a prefix, or around it, ends inside of it or is refused."""
    allowed = AllowedSources([parse_prefix(prefix)])
    for text in (prefix + tail, tail + prefix, prefix.replace("//", f"//{tail}")):
        try:
            address = allowed.resolve(text)
        except InvalidArgumentError:
            continue
        written = address.url("file") if address.scheme == "https" else f"{address}/file"
        assert written.startswith(prefix)
        assert not {"..", ".", ""}.intersection(address.path)
