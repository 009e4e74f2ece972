"""Certificates and tokens as files: what is taken, what is refused and in which words, and what changes."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import structlog
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from certificates import Authority, Pair
from deltaplane import tls_credentials
from deltaplane_server.access import followed_files
from deltaplane_server.access.certificates import Identity, IdentityFiles
from deltaplane_server.access.followed_files import FlaggedFile, FollowedFiles
from deltaplane_server.access.plane_access import Access
from deltaplane_server.access.tokens import MAX_TOKENS, Tokens, parse_tokens
from deltaplane_server.startup import StartupError
from fake_backend import server_config

TOKEN = "0123456789abcdef"


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(StartupError) as caught:
        Access.of(server_config(**config))
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestTokens:
    def parse(self, text: str | bytes) -> Tokens:
        file = FlaggedFile("--api-token-file", Path("/tokens"))
        return parse_tokens(file, text if isinstance(text, bytes) else text.encode())

    def test_one_a_line_with_comments(self) -> None:
        tokens = self.parse(f"# made by hand\r\n\r\n  {TOKEN}\t# team a\r\nabc-._~+/DEF-12345==\n{TOKEN}")
        assert len(tokens) == 2
        assert TOKEN in tokens
        assert "abc-._~+/DEF-12345==" in tokens
        assert not [
            other for other in ("", "#", TOKEN[:-1], TOKEN + "=", TOKEN.upper(), "ä") if other in tokens
        ]

    @pytest.mark.parametrize(
        "line",
        ["a" * 15, "a" * 513, "two words, too many", "a" * 16 + "ä", "=" * 20, b"\xff" * 20, "\0" * 20],
    )
    def test_what_is_no_token_is_named_by_its_line_and_not_shown(self, line: str | bytes) -> None:
        data = line if isinstance(line, bytes) else line.encode()
        with pytest.raises(StartupError) as caught:
            self.parse(TOKEN.encode() + b"\n" + data)
        assert str(caught.value).startswith(
            "--api-token-file /tokens: line 2 is no token, which is 16 to 512"
        )
        assert "aaaa" not in str(caught.value)

    def test_none_and_too_many(self) -> None:
        with pytest.raises(StartupError, match="there is no token in it"):
            self.parse("# none\n")
        assert len(self.parse("\n".join(f"{number:020}" for number in range(MAX_TOKENS)))) == MAX_TOKENS
        with pytest.raises(StartupError, match=f"it has {MAX_TOKENS + 1} tokens; at most {MAX_TOKENS}"):
            self.parse("\n".join(f"{number:020}" for number in range(MAX_TOKENS + 1)))

    def test_they_are_not_kept(self) -> None:
        tokens = self.parse(TOKEN)
        assert TOKEN not in repr(vars(tokens))

    @pytest.mark.parametrize(
        ("metadata", "reason"),
        [
            ([], "TOKEN_MISSING"),
            ([("authorization-bin", b"Bearer " + TOKEN.encode())], "TOKEN_MISSING"),
            ([("authorization", f"Bearer {TOKEN}")], None),
            ([("x", "y"), ("authorization", f"BEARER   {TOKEN} ")], None),
            ([("authorization", f"Bearer{TOKEN}")], "TOKEN_NOT_ACCEPTED"),
            ([("authorization", "Bearer")], "TOKEN_NOT_ACCEPTED"),
            ([("authorization", f"Bearer {TOKEN} {TOKEN}")], "TOKEN_NOT_ACCEPTED"),
            ([("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")], "TOKEN_NOT_ACCEPTED"),
        ],
    )
    def test_metadata(self, metadata: list[tuple[str, str | bytes]], reason: str | None) -> None:
        error = self.parse(TOKEN).check(metadata)
        assert (error and error.reason) == reason
        assert error is None or TOKEN not in error.message


class TestFollowedFiles:
    @pytest.fixture
    def file(self, tmp_path: Path) -> FlaggedFile:
        path = tmp_path / "file"
        path.write_text("one")
        return FlaggedFile("--file", path)

    def test_a_change_is_taken_over(self, file: FlaggedFile) -> None:
        files = FollowedFiles([file, file], lambda contents: contents)
        state = file.path.stat()
        file.path.write_text("two")
        os.utime(file.path, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert files.value == (b"one", b"one")
        files.refresh()
        assert files.value == (b"two", b"two")

    def test_nothing_is_parsed_again_without_one(self, file: FlaggedFile) -> None:
        files = FollowedFiles([file], lambda contents: object())
        first = files.value
        os.utime(file.path)
        files.refresh()
        assert files.value is first

    def test_what_changes_while_it_is_parsed_waits_for_the_next_look(self, file: FlaggedFile) -> None:
        def parse(contents: object) -> object:
            if contents == (b"two",):
                file.path.write_text("three")
            return contents

        files = FollowedFiles([file], parse)
        file.path.write_text("two")
        files.refresh()
        assert files.value == (b"one",)
        files.refresh()
        assert files.value == (b"three",)

    def test_a_failure_is_told_once_and_again_after_it_was_mended(self, file: FlaggedFile) -> None:
        files = FollowedFiles([file], lambda contents: contents)
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                os.unlink(file.path)
                files.refresh()
                files.refresh()
                file.path.write_text("one")
                files.refresh()
        assert [entry["event"] for entry in logs] == ["access.files_unusable"] * 2
        assert "No such file or directory" in logs[0]["reason"]
        assert files.value == (b"one",)

    def test_files_that_cannot_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(followed_files, "MAX_FILE_BYTES", 10)
        (tmp_path / "large").write_bytes(bytes(11))
        os.mkfifo(tmp_path / "fifo")
        for name, why in (
            ("missing", "cannot be read (No such file or directory)"),
            ("", "cannot be read (Is a directory)"),
            ("fifo", "is not a regular file"),
            ("large", "has over 10 bytes"),
        ):
            with pytest.raises(StartupError, match=re.escape(why)):
                FollowedFiles([FlaggedFile("--file", tmp_path / name)], lambda contents: contents)


class TestIdentity:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path)

    def config(self, certificate: Path, key: Path, client_ca: Path | None = None) -> dict[str, Any]:
        more = {} if client_ca is None else {"tls_client_ca_file": client_ca}
        return {"tls_cert_file": certificate, "tls_key_file": key, **more}

    def identity(self, pair: Pair) -> Identity:
        files = IdentityFiles(
            FlaggedFile("--tls-cert-file", pair.certificate), FlaggedFile("--tls-key-file", pair.key), None
        )
        return FollowedFiles(files.all, files.parse).value

    def test_a_pair_is_taken_and_its_key_not_shown(self, authority: Authority) -> None:
        pair = authority.issue()
        identity = self.identity(pair)
        assert identity.private_key == pair.key.read_bytes()
        assert "PRIVATE KEY" not in repr(identity)
        assert "PRIVATE KEY" not in repr(identity.configuration())

    @pytest.mark.parametrize(
        "fields",
        [
            ["tls_cert_file"],
            ["tls_key_file"],
            ["tls_client_ca_file"],
            ["admin_tls_client_ca_file"],
            ["tls_key_file", "tls_client_ca_file"],
        ],
    )
    def test_half_of_tls_is_not_taken_for_none(self, fields: list[str], tmp_path: Path) -> None:
        message = refusal({field: tmp_path / field for field in fields})
        flag = "--" + fields[0].replace("_", "-")
        assert message.startswith(f"{flag} {tmp_path}/{fields[0]}: TLS takes a certificate and its key")

    def test_files_that_are_not_there(self, authority: Authority, tmp_path: Path) -> None:
        pair, missing = authority.issue(), tmp_path / "missing"
        for config, flag in (
            (self.config(missing, pair.key), "--tls-cert-file"),
            (self.config(pair.certificate, missing), "--tls-key-file"),
            (self.config(pair.certificate, pair.key, missing), "--tls-client-ca-file"),
        ):
            why = "it cannot be read (No such file or directory)"
            assert refusal(config).startswith(f"{flag} {missing}: {why}")

    def test_files_that_hold_something_else(self, authority: Authority, tmp_path: Path) -> None:
        pair = authority.issue()
        (tmp_path / "text").write_text("no PEM at all")
        for other in (tmp_path / "text", pair.key):
            assert refusal(self.config(other, pair.key)).startswith(
                f"--tls-cert-file {other}: it holds no certificate in PEM"
            )
            assert refusal(self.config(pair.certificate, pair.key, other)).startswith(
                f"--tls-client-ca-file {other}: it holds no certificate in PEM"
            )
        for other in (tmp_path / "text", pair.certificate):
            assert refusal(self.config(pair.certificate, other)).startswith(
                f"--tls-key-file {other}: it is not the key of --tls-cert-file {pair.certificate}"
            )

    def test_a_key_of_another_certificate(self, authority: Authority) -> None:
        one, other = authority.issue("one"), authority.issue("other")
        message = refusal(self.config(one.certificate, other.key))
        assert message.startswith(f"--tls-key-file {other.key}: it is not the key of --tls-cert-file")
        assert "key values mismatch" in message

    def test_an_encrypted_key(self, authority: Authority) -> None:
        pair = authority.issue()
        key = load_pem_private_key(pair.key.read_bytes(), None)
        encryption = BestAvailableEncryption(b"secret")
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        assert "the key is encrypted; decrypt it" in refusal(self.config(pair.certificate, pair.key))

    @pytest.mark.parametrize(("starts", "why"), [(-32, "has expired"), (1, "is not yet valid")])
    def test_a_certificate_at_another_time(self, authority: Authority, starts: int, why: str) -> None:
        pair = authority.issue(starts_in_days=starts)
        assert refusal(self.config(pair.certificate, pair.key)).startswith(
            f"--tls-cert-file {pair.certificate}: it cannot be used (certificate {why}); renew it"
        )

    def test_a_bundle_of_authorities_may_have_comments_in_any_language(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        pair, bundle = authority.issue(), tmp_path / "bundle"
        other = Authority(tmp_path, "other").file.read_text()
        bundle.write_text(f"# Főtanúsítvány\n{other}\n{authority.file.read_text()}")
        Access.of(server_config(**self.config(pair.certificate, pair.key, bundle)))
        tls_credentials(bundle)

    def test_authorities_that_are_none(self, authority: Authority) -> None:
        pair = authority.issue()
        message = refusal(self.config(pair.certificate, pair.key, pair.certificate))
        assert "none of its certificates is an authority's" in message

    def test_each_plane_has_its_authority(self, authority: Authority, tmp_path: Path) -> None:
        pair, admins = authority.issue(), Authority(tmp_path, "admins")
        config = self.config(pair.certificate, pair.key)
        cases: list[tuple[dict[str, Any], tuple[bool, bool]]] = [
            ({}, (False, False)),
            ({"tls_client_ca_file": authority.file}, (True, True)),
            ({"admin_tls_client_ca_file": admins.file}, (False, True)),
        ]
        for more, known in cases:
            access = Access.of(server_config(**config, **more))
            assert access.data_plane.has_tls
            assert access.control_plane.has_tls
            assert (access.data_plane.knows_callers, access.control_plane.knows_callers) == known
