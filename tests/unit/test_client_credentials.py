"""What the Python clients show to a server: files that can be used, and the words for those that cannot."""

from pathlib import Path

import pytest

from certificates import Authority
from deltaplane import ChannelConfig, tls_credentials, token_from_file
from deltaplane.errors import InvalidArgumentError

TOKEN = "0123456789abcdef"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(*files: Path | None) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        tls_credentials(*files)
    return caught.value.message


def test_files_of_tls(authority: Authority) -> None:
    pair = authority.issue("client")
    tls_credentials()
    tls_credentials(authority.file)
    tls_credentials(str(authority.file), str(pair.certificate), str(pair.key))
    tls_credentials(cert_file=pair.certificate, key_file=pair.key)


def test_files_of_tls_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    pair, other, missing = authority.issue("client"), authority.issue("other"), tmp_path / "missing"
    (tmp_path / "text").write_text("no PEM")
    assert refusal(missing) == f"ca_file: {missing} cannot be read (No such file or directory)"
    assert refusal(tmp_path).startswith("ca_file: ")
    assert refusal(tmp_path / "text") == f"ca_file: {tmp_path}/text holds no certificate in PEM"
    assert refusal(None, pair.certificate) == "key_file: is missing: a certificate and its key come together"
    assert refusal(None, None, pair.key).startswith("cert_file: is missing")
    assert refusal(None, pair.certificate, missing).startswith(f"key_file: {missing} cannot be read")
    for key in (other.key, pair.certificate, tmp_path / "text"):
        message = refusal(None, pair.certificate, key)
        assert message.startswith(
            f"key_file: {key} is not the key, in PEM and not encrypted, of a certificate"
        )


def test_a_token_is_metadata_of_each_call() -> None:
    config = ChannelConfig(metadata=[("x", "y")], token=f" {TOKEN}\n")
    assert config.call_metadata() == (("x", "y"), ("authorization", f"Bearer {TOKEN}"))
    assert ChannelConfig(metadata=[("x", "y")]).call_metadata() == (("x", "y"),)


def test_a_token_is_not_shown() -> None:
    assert TOKEN not in repr(ChannelConfig(token=TOKEN, metadata=[("authorization", TOKEN)]))


def test_a_token_in_a_file_is_read_at_each_call(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    config = ChannelConfig(token=token_from_file(file))
    assert config.call_metadata() == (("authorization", f"Bearer {TOKEN}"),)
    file.write_text("another")
    assert config.call_metadata() == (("authorization", "Bearer another"),)
    file.unlink()
    with pytest.raises(InvalidArgumentError, match=f"token_file: {file} cannot be read"):
        config.call_metadata()


@pytest.mark.parametrize("token", ["", "\n", "two words", "two\nlines", "t\xf6ken", "t\0ken"])
def test_what_is_no_token(token: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^token: it is not one word of visible ASCII") as caught:
        ChannelConfig(token=token).call_metadata()
    assert "two" not in caught.value.message
    (tmp_path / "token").write_text(token)
    with pytest.raises(InvalidArgumentError, match=r"^token: it is not one word"):
        token_from_file(tmp_path / "token")
