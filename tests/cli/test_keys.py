"""`zmqtrain keys`: what it makes, says and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqtrain.cli import main
from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.zmq_keys import CurveKeys


def test_keys_are_made_listed_and_revoked_and_no_secret_is_ever_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = KeyFolder(tmp_path / ".config" / "zmqtrain" / "keys")
    assert main(["keys", "list"]) == 0
    assert main(["keys", "new", "pc1", "pc2"]) == 0
    secrets = [CurveKeys.load(folder.secret_of(name)).secret.decode() for name in ("pc1", "pc2")]
    said = capsys.readouterr().out
    assert f"scp {folder.secret_of('pc2')} pc2:" in said and "zmqtrain keys new NAME makes one" in said
    folder.new(["lab"])
    assert main(["keys", "revoke", "pc1"]) == 0
    assert "still comes in" in capsys.readouterr().out
    assert main(["keys", "revoke", "lab"]) == 0
    assert "still comes in" not in capsys.readouterr().out
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    rows = [line.split() for line in listed.splitlines()]
    assert ["pc1", "revoked"] in [[row[0], row[-1]] for row in rows]
    assert ["pc2", "authorised"] in [[row[0], row[-1]] for row in rows]
    assert not any(secret in said + listed for secret in [*secrets, folder.hub().secret.decode()])


def test_the_hubs_own_keys_are_made_alone_if_they_are_asked_for(tmp_path: Path) -> None:
    assert main(["keys", "new", "hub", "--folder", str(tmp_path)]) == 0
    assert [entry.name for entry in KeyFolder(tmp_path).entries()] == ["hub"]


def test_what_cannot_be_done_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "revoke", "pc9", "--folder", str(tmp_path)]) != 0
    assert "no key of the name" in capsys.readouterr().err
    assert main(["keys", "nwe", "pc9"]) == 2
    assert "did you mean new?" in capsys.readouterr().err
    assert main(["keys", "new", "--folder", str(tmp_path)]) == 2
    assert "zmqtrain keys new pc1 pc2" in capsys.readouterr().err
    assert main(["keys"]) == 2
    assert "revoke NAME" in capsys.readouterr().out
