"""A hub's folder of keys: who is in it, what is made where, and what is said of what cannot be."""

from __future__ import annotations

import logging
import stat
import threading
from pathlib import Path

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.zmq_keys import CurveKeys, fingerprint, load_public_key, read_credentials


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of here: threads that an earlier test has left may still say something of theirs."""
    here = threading.get_ident()
    records = [record for record in caplog.records if record.levelno == logging.WARNING and record.thread == here]
    return [record.getMessage() for record in records]


def test_a_new_key_is_one_private_file_for_its_pc_and_a_public_one_that_is_authorised(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    (secret,) = folder.new(["pc1"])
    pair = CurveKeys.load(secret)
    assert pair.server == folder.hub().public
    assert folder.authorised() == {folder.hub().public.decode(): "hub", pair.public.decode(): "pc1"}
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    for path in folder.authorised_folder.iterdir():
        assert pair.secret not in path.read_bytes()


def test_who_is_revoked_comes_in_no_more_and_its_name_may_be_given_anew(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    for _ in range(3):
        folder.new(["pc1", "pc2"])
        before = folder.stamp()
        for name in ("pc1", "pc2"):
            assert folder.revoke(name).parent == tmp_path / "revoked"
        assert list(folder.authorised().values()) == ["hub"] and folder.stamp() != before
        assert not folder.secret_of("pc1").exists()
    revoked = {entry.name for entry in folder.entries() if entry.state == "revoked"}
    assert revoked == {"pc1", "pc1.2", "pc1.3", "pc2", "pc2.2", "pc2.3"}
    with pytest.raises(ConfigError, match=r"no key of the name 'pc1' is authorised.*nobody is"):
        folder.revoke("pc1")


@pytest.mark.parametrize("name", ["", "hub", "a/b", "..", ".hidden", "a b", "é", "x" * 65])
def test_a_name_that_cannot_be_a_file_of_ours_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    folder = KeyFolder(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be the name"):
        folder.new(["pc1", name])
    with pytest.raises(ConfigError, match="cannot be the name"):
        folder.revoke(name)
    assert not folder.path.exists()


def test_a_name_that_is_taken_is_refused_and_none_of_the_others_is_made(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.new(["pc2"])
    with pytest.raises(ConfigError, match="zmqtrain keys revoke pc2"):
        folder.new(["pc1", "pc2"])
    assert list(folder.authorised().values()) == ["hub", "pc2"]


def test_a_key_that_is_there_twice_counts_once_and_a_file_that_is_none_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = KeyFolder(tmp_path)
    folder.new(["pc1"])
    (folder.authorised_folder / "twin.key").write_bytes((folder.authorised_folder / "pc1.key").read_bytes())
    (folder.authorised_folder / "broken.key").write_text("nothing")
    (folder.authorised_folder / "notes.txt").write_text("nothing")
    for _ in range(3):
        assert list(folder.authorised().values()) == ["hub", "pc1"]
    said = warnings_of(caplog)
    assert len(said) == 2 and "broken.key" in said[0] and "holds the key of pc1 once more" in said[1]


def test_a_secret_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (secret,) = KeyFolder(tmp_path).new(["pc1"])
    CurveKeys.load(secret)
    assert not warnings_of(caplog)
    secret.chmod(0o644)
    pair = CurveKeys.load(secret)
    (said,) = warnings_of(caplog)
    assert f"chmod 600 {secret}" in said
    assert pair.secret.decode() not in caplog.text


def test_the_file_of_a_pc_is_all_that_it_needs_and_a_key_is_given_itself_or_by_its_file(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    (secret,) = folder.new(["pc1"])
    pair, hub = CurveKeys.load(secret), folder.hub()
    assert read_credentials(None, None) == read_credentials("", "") == (None, None)
    for given in (secret, str(secret), pair):
        assert read_credentials(None, given) == (hub.public, pair)
    other = CurveKeys.generate()
    for server_key in (other.public, other.public.decode()):
        assert read_credentials(server_key, pair) == (other.public, pair)
    assert read_credentials(tmp_path / "hub.key", None) == (hub.public, None)
    assert load_public_key(tmp_path / "hub.key_secret") == hub.public
    with pytest.raises(ConfigError, match="'short' is neither"):
        read_credentials("short", None)
    with pytest.raises(ConfigError, match="does not say for which hub"):
        read_credentials(None, other)


def test_no_secret_is_in_what_python_shows_of_a_pair() -> None:
    pair = CurveKeys.generate()
    assert pair.secret.decode() not in repr(pair) + str(pair) + f"{(pair, pair)}"
    assert fingerprint(pair.public) == fingerprint(pair.public) != fingerprint(pair.secret)
