"""The systemd units: systemd finds nothing wrong with them, and no file that somebody has changed is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from zmqtrain.cli import main
from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.node import NodeConfig
from zmqtrain.cli.settings import read_config
from zmqtrain.cli.units import Places, UnitsConfig, closed_folder, is_unchanged, owner_of, program_line, unit_files
from zmqtrain.core.errors import ConfigError

HUB = "tcp://192.168.1.10:5555"


def files_of(owner: str = "lab", **options: object) -> dict[str, str]:
    """Return the files of these options, by name."""
    config = UnitsConfig(**({"hub": HUB} | options))
    return {file.path.name: file.content for file in unit_files(config, Places.of(config.user), owner)}


def options_of(unit: str) -> dict[str, list[str]]:
    """Return the values of a unit's settings, by name."""
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize(
    ("user", "insecure", "owner"), [(False, False, ""), (False, True, "root"), (True, False, ""), (True, True, "")]
)
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, user: bool, insecure: bool, owner: str) -> None:
    made = files_of(owner, user=user, insecure=insecure)
    paths = []
    for name, content in made.items():
        if name.endswith(".service"):
            paths.append(tmp_path / name.replace("@", "@0"))
            paths[-1].write_text(content)
    command = ["systemd-analyze", *(["--user"] if user else []), "verify", *map(str, paths)]
    # a user's manager asks where the user's run-time folder is
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    )
    said = [line for line in result.stderr.splitlines() if "zmqtrain" in line]
    assert (result.returncode, said) == (0, [])


def test_the_broker_is_watched_and_what_a_restart_would_not_help_is_not_restarted() -> None:
    unit = options_of(files_of()["zmqtrain-broker.service"])
    assert unit["Type"] == ["notify"] and float(unit["WatchdogSec"][0]) > 0
    assert unit["Restart"] == ["on-failure"] and unit["RestartPreventExitStatus"] == ["78"]
    assert unit["KillSignal"] == ["SIGINT"] and unit["User"] == ["lab"] and "DynamicUser" not in unit


def test_a_node_is_started_again_always_with_the_key_that_systemd_hands_it() -> None:
    unit = options_of(files_of("")["zmqtrain-node@.service"])
    assert unit["Restart"] == ["always"] and unit["KillSignal"] == ["SIGINT"] and unit["DynamicUser"] == ["yes"]
    assert unit["LoadCredential"] == ["node.key_secret:/etc/zmqtrain/node.key_secret"]
    assert unit["ExecStart"][0].endswith("--keys ${CREDENTIALS_DIRECTORY}/node.key_secret")
    assert int(unit["Nice"][0]) > 0 and unit["ProtectSystem"] == ["strict"] and unit["TimeoutStopSec"]
    assert unit["WorkingDirectory"] == ["%S/" + unit["StateDirectory"][0]]


def test_where_the_hub_has_no_keys_none_is_named() -> None:
    made = files_of(insecure=True)
    assert "key" not in "".join(options_of(made["zmqtrain-node@.service"])["ExecStart"])
    assert "LoadCredential" not in options_of(made["zmqtrain-node@.service"])
    assert tomllib.loads(made["broker.toml"])["insecure"] is True


def test_broker_and_node_read_the_settings_files(tmp_path: Path) -> None:
    for user in (False, True):
        for name, content in files_of(user=user).items():
            (tmp_path / name).write_text(content)
        broker = read_config(BrokerConfig, "zmqtrain-broker", ["--config", str(tmp_path / "broker.toml")])
        assert broker.checkpoint == Path("run1") and broker.keys == (None if user else Path("keys"))
        node = read_config(NodeConfig, "zmqtrain-node", ["--config", str(tmp_path / "node.toml"), "--name", "pc-0"])
        assert (node.hub, node.checkpoint, node.new_run) == (HUB, Path("kept"), True)


def test_a_programs_line_is_that_of_this_installation_and_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "100% of $HOME"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    written = str(folder).replace("%", "%%").replace("$", "$$")
    assert program_line("zmqtrain-node") == f'"{written}/python" -m zmqtrain.cli node'
    (folder / "zmqtrain-node").touch()
    assert program_line("zmqtrain-node") == f'"{written}/zmqtrain-node"'


def test_services_run_as_the_owner_of_the_installation(tmp_path: Path) -> None:
    assert owner_of(Path("/")) == ""
    os.chown(tmp_path, 1, 1)  # of root's doing, as the star is
    assert owner_of(tmp_path) == "daemon"
    os.chown(tmp_path, 54321, 54321)
    with pytest.raises(ConfigError, match="--run-as"):
        owner_of(tmp_path)


def test_a_folder_on_the_way_to_python_that_others_cannot_enter_is_named(tmp_path: Path) -> None:
    program = tmp_path / "open/closed/bin/python"
    program.parent.mkdir(parents=True)
    program.touch()
    outside = closed_folder(tmp_path)  # pytest's own folder is its user's alone
    (tmp_path / "open/closed").chmod(0o750)
    assert closed_folder(program) == (outside or tmp_path / "open/closed")
    assert closed_folder(Path("/bin/sh")) is None


def install(root: Path, *more: str) -> int:
    return main(["units", "--install", "--root", str(root), "--hub", HUB, *more])


def test_what_is_installed_is_what_is_printed_and_the_next_steps_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(tmp_path) == 0
    said = capsys.readouterr().out
    for word in ("systemctl daemon-reload", "enable --now zmqtrain-broker", "enable --now zmqtrain-node@0", "scp"):
        assert word in said
    assert main(["units", "--hub", HUB]) == 0
    printed = capsys.readouterr().out
    found = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert [str(path) for path in found] == [
        "etc/systemd/system/zmqtrain-broker.service",
        "etc/systemd/system/zmqtrain-node@.service",
        "etc/zmqtrain/broker.toml",
        "etc/zmqtrain/node.toml",
    ]
    for path in found:
        text = (tmp_path / path).read_text()
        assert f"# /{path}\n" in printed and text.partition("\n")[2] in printed
        assert is_unchanged(text) == (path.suffix == ".service")


def test_a_unit_that_was_changed_is_not_overwritten_without_force_which_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path)
    units = tmp_path / "etc/systemd/system"
    node, broker = units / "zmqtrain-node@.service", units / "zmqtrain-broker.service"
    changed = node.read_text().replace("Nice=10", "Nice=0")
    node.write_text(changed)
    broker.unlink()
    capsys.readouterr()
    assert install(tmp_path) == 2
    said = capsys.readouterr().err
    assert "-Nice=0" in said and "+Nice=10" in said and "--force" in said
    assert node.read_text() == changed and not broker.exists()  # nothing is written by halves
    assert install(tmp_path, "--force") == 0
    assert "Nice=10" in node.read_text() and (units / "zmqtrain-node@.service.former").read_text() == changed
    assert broker.exists()


def test_an_unchanged_unit_of_an_earlier_zmqtrain_is_replaced_and_settings_are_their_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "--insecure")
    settings = tmp_path / "etc/zmqtrain/node.toml"
    settings.write_text('hub = "tcp://other:1"\n')
    capsys.readouterr()
    assert install(tmp_path, "--force") == 0
    said = capsys.readouterr().out
    assert "replaced" in said and "stays as it is" in said
    assert "LoadCredential" in (tmp_path / "etc/systemd/system/zmqtrain-node@.service").read_text()
    assert settings.read_text() == 'hub = "tcp://other:1"\n'
    assert not list(tmp_path.rglob("*.former"))
    assert install(tmp_path) == 0
    assert "as it should be" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--install"], "--hub"),
        (["--hub", "192.168.1.10"], "tcp://HOST:PORT"),
        (["--force"], "--install"),
        (["--user", "--run-as", "lab"], "--run-as"),
        (["--run-as", "a b"], "run_as"),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["units", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").write_text("a file")
    assert install(tmp_path) == 2
    assert str(tmp_path / "etc/systemd/system") in capsys.readouterr().err
