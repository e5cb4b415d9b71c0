"""What the commands decide before, beside and after a run: names, addresses, pace, interruptions, endings."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import zmqtrain
from zmqtrain.cli import COMMANDS, broker, broker_main, local, main, node_main
from zmqtrain.cli.broker import (
    BrokerConfig,
    check_checkpoint,
    check_program,
    describe_program,
    ending,
    finished,
    greeting,
    node_addresses,
    open_keys,
    result,
    saving,
    shard_greeting,
    stop_line,
)
from zmqtrain.cli.display import say
from zmqtrain.cli.ending import end_signals, first_interrupt, run_command
from zmqtrain.cli.local import Departure, share_of_cores
from zmqtrain.cli.node import Interruption, load_run_program, model_line, paced, say_alone
from zmqtrain.core import installed
from zmqtrain.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HubUnreachable,
    JoinRefused,
    ModelMismatch,
    NotHereYet,
    RunStopped,
    SteppedDown,
)
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol.framing import PROTOCOL_VERSION
from zmqtrain.protocol.messages import Roster, replace_fields
from zmqtrain.session.hub_session import Solitude
from zmqtrain.transport import address as address_module
from zmqtrain.transport.address import public_address
from zmqtrain.transport.key_folder import KeyFolder
from zmqtrain.transport.zmq_keys import CurveKeys


def test_the_umbrella_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in [*COMMANDS, "--version"])
    assert main([]) == 2


def test_the_umbrella_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["node", "--version"]) == 0
    assert capsys.readouterr().out == 2 * f"zmqtrain {zmqtrain.__version__}, protocol version {PROTOCOL_VERSION}\n"


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == 2
    assert "did you mean status?" in capsys.readouterr().err


def test_importing_the_umbrella_and_the_broker_loads_no_jax() -> None:
    program = "import sys, zmqtrain.cli, zmqtrain.cli.broker, zmqtrain.cli.settings; print('jax' in sys.modules)"
    argv = [sys.executable, "-c", program]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_first_of_several_shards_says_how_the_others_are_started() -> None:
    here = "tcp://127.0.0.1:5555"
    *_, others, line = greeting(BrokerConfig(shard="0/4", bind=here), "run-1", -1, here, None).splitlines()
    assert "I = 1 to 3" in others and line.endswith(f"zmqtrain-broker --shard I/4 --first {here} --insecure")
    other = BrokerConfig(shard="2/4", first=here, bind="tcp://127.0.0.1:0")
    said = shard_greeting(other, "run-1", 7, "tcp://127.0.0.1:6000")
    assert "resumed at version 7: shard 2/4, which nodes reach at tcp://127.0.0.1:6000" in said and here in said


def test_where_nodes_reach_a_shard_follows_from_the_way_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"10.0.0.1": "10.0.0.7", "192.0.2.1": "10.0.0.8"}
    monkeypatch.setattr(address_module, "local_address", lambda host="192.0.2.1", port=9: ways.get(host, ""))
    own = "tcp://127.0.0.1:6000"
    assert public_address("tcp://*:6000", own, "tcp://10.0.0.1:5555") == "tcp://10.0.0.7:6000"
    assert public_address("tcp://*:6000", own, "tcp://127.0.0.1:5555") == "tcp://10.0.0.8:6000"
    assert public_address("tcp://127.0.0.1:0", own, "tcp://10.0.0.1:5555") == own
    ways.clear()
    assert public_address("tcp://*:6000", own, "tcp://10.0.0.1:5555") == own


def test_an_error_of_ours_is_one_paragraph_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise HubUnreachable("no broker answers", "tcp://hub:5555")

    assert run_command("zmqtrain-node", fail) == 2
    assert capsys.readouterr().err == "zmqtrain-node: no broker answers\n"


def test_an_error_that_is_a_fault_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command("zmqtrain-node", lambda: 1 // 0)


def test_an_interrupted_command_ends_well() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_command("zmqtrain-node", interrupted) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JoinRefused("", "superseded"), 78),
        (JoinRefused("", "revoked"), 78),
        (JoinRefused("", "run"), 78),
        (JoinRefused("", "occupied"), 2),
        (HubUnreachable("", "", "key"), 78),
        (HubUnreachable(""), 2),
        (SteppedDown(), 78),
        (ModelMismatch(""), 78),
        (ConfigError(""), 78),
        (NotHereYet(""), 2),
        (CheckpointError(""), 2),
        (SystemExit(2), 78),
        (SystemExit(0), 0),
    ],
)
def test_a_service_that_would_end_the_same_way_again_says_so_by_its_exit_code(error: BaseException, code: int) -> None:
    def fail() -> int:
        raise error

    assert run_command("zmqtrain-node", fail, service=True) == code
    assert run_command("zmqtrain status", fail) == (0 if code == 0 else 2)


def test_the_commands_that_are_services_say_so_by_their_exit_codes() -> None:
    assert main(["node", "tcp://hub"]) == main(["broker", "--bind", "hub"]) == 78
    assert main(["status", "tcp://hub"]) == 2


def test_the_broker_refuses_a_slip_of_the_keyboard_in_a_programs_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'text'\?"):
        check_program(RunSettings(program="txt"))
    assert check_program(RunSettings(program="image", program_arguments="width=8")) == ""
    assert check_program(RunSettings()) == ""


def test_the_broker_lets_a_program_pass_that_only_the_nodes_have_and_says_so() -> None:
    assert "every node must have the package" in check_program(RunSettings(program="protein-folding"))


@pytest.mark.parametrize("arguments", ["widht=8", "width=wide", "width=30,heads=4", "width=8,width=9"])
def test_the_broker_refuses_arguments_that_its_program_does_not_take(arguments: str) -> None:
    with pytest.raises(ConfigError, match=r"program_arguments\.widt?ht?"):
        check_program(RunSettings(program="text", program_arguments=arguments))


def test_the_programs_are_listed_with_their_arguments_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["programs"]) == 0
    said = capsys.readouterr().out
    assert "text: A decoder-only transformer over bytes\n  data=stdlib, width=64," in said and "image: " in said
    assert all(len(line) < 80 for line in said.splitlines())
    assert main(["programs", "text"]) == 0
    assert "clip: largest norm of a gradient" in " ".join(capsys.readouterr().out.split())
    assert main(["programs", "txt"]) == 2
    assert "the choices are text, image" in capsys.readouterr().err


def test_a_node_without_the_programs_package_is_told_to_install_it_there() -> None:
    with pytest.raises(
        ConfigError, match=r"this PC cannot: .*the choices are text, image.* here, on this PC"
    ) as caught:
        load_run_program(RunSettings(program="protein-folding"), "", "tcp://hub:5555")
    assert "correct them where it is started" not in str(caught.value)


def test_arguments_without_a_program_are_refused() -> None:
    with pytest.raises(ConfigError, match="--program text"):
        check_program(RunSettings(program_arguments="width=8"))


def test_what_is_trained_is_said_in_a_few_words() -> None:
    assert describe_program(RunSettings(program="text", program_arguments="width=8")) == "text (width=8)"
    assert "first node" in describe_program(RunSettings())


def test_the_addresses_for_nodes_name_this_machine_and_the_port_that_was_chosen() -> None:
    assert node_addresses("tcp://127.0.0.1:0", "tcp://127.0.0.1:4711") == ["tcp://127.0.0.1:4711"]
    for address in node_addresses("tcp://*:0", "tcp://127.0.0.1:4711"):
        assert address.endswith(":4711") and "*" not in address


def test_the_broker_says_what_to_type_or_what_to_write_where_there_is_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, keys = "tcp://127.0.0.1:6000", KeyFolder(tmp_path)
    (lab,) = keys.new(["lab"])

    def said(program: str, keys: KeyFolder | None) -> list[str]:
        return greeting(BrokerConfig(program=program, bind=here), "run-1", -1, here, keys).splitlines()[1:]

    monkeypatch.setattr(installed.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert said("text", None) == ["type on this machine:", f"  zmqtrain-node {here}"]
    assert said("", None) == ["connect your training loop on this machine:", f'  zmqtrain.connect("{here}")']
    _, there = said("text", keys)
    assert there.endswith(f"zmqtrain-node {here} --keys {lab}"), "nothing need be copied"
    assert said("", keys)[1].endswith(f'zmqtrain.connect("{here}", keys="{lab}")')
    assert CurveKeys.load(lab).secret.decode() not in "".join(said("text", keys))


def test_what_the_broker_says_to_type_on_each_pc_works_there_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeyFolder(tmp_path / "my keys")
    (lab,) = keys.new(["lab"])
    monkeypatch.setattr(broker, "local_address", lambda: "10.0.0.1")
    monkeypatch.setattr(broker.socket, "gethostname", lambda: "hub")

    def said(program: str) -> list[str]:
        config = BrokerConfig(program=program, bind="tcp://*:5555", shard="0/2")
        return greeting(config, "run-1", -1, "tcp://127.0.0.1:5555", keys).splitlines()[1:]

    monkeypatch.setattr(installed.shutil, "which", lambda name: f"/usr/bin/{name}")
    each, copy, where, first, second, _, others = said("text")
    assert copy == f"  scp '{lab}' PC:" and f"zmqtrain keys new NAME... --folder '{keys.path}'" in each
    assert where == "type on each PC, one of:"
    assert first == "  zmqtrain-node tcp://10.0.0.1:5555 --keys ~/lab.key_secret", "a number first"
    assert second == "  zmqtrain-node tcp://hub:5555 --keys ~/lab.key_secret"
    assert others == "  zmqtrain-broker --shard I/2 --first tcp://10.0.0.1:5555 --keys FOLDER"
    assert said("")[3] == '  zmqtrain.connect("tcp://10.0.0.1:5555", keys="~/lab.key_secret")'
    monkeypatch.setattr(installed.shutil, "which", lambda name: None)
    assert said("text")[2:4] == [
        "type on each PC in its clone of zmqtrain, one of:",
        "  bin/zmqtrain-node tcp://10.0.0.1:5555 --keys ~/lab.key_secret",
    ]
    keys.new([f"pc{number}" for number in range(20)])
    who, copy, _, first, *_ = said("text")
    assert "lab, pc0, pc1, pc10" in who and "and 13 more" in who
    assert copy == f"  scp '{keys.path}/nodes'/NAME.key_secret NAME:" and first.endswith("~/NAME.key_secret")


def test_what_a_command_says_fills_a_terminal_and_breaks_no_line_that_is_to_be_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "one two three four five six\n  zmqtrain-node tcp://192.168.1.10:5555"
    say(text)
    assert capsys.readouterr().out == f"{text}\n", "it is no terminal"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say(text)
    assert capsys.readouterr().out.splitlines() == [
        "one two three four",
        "five six",
        "  zmqtrain-node tcp://192.168.1.10:5555",
    ]


def test_a_key_in_the_home_folder_is_named_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = KeyFolder(tmp_path / ".config" / "keys")
    keys.new(["lab"])
    said = greeting(BrokerConfig(program="text"), "run-1", -1, "tcp://127.0.0.1:5555", keys)
    assert "\n  scp ~/.config/keys/nodes/lab.key_secret PC:\n" in said


def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    check_checkpoint(tmp_path / "a" / "new" / "one")
    check_checkpoint(None)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="name another folder"):
        check_checkpoint(tmp_path / "file")


def test_a_broker_says_where_its_model_is_and_how_to_go_on(tmp_path: Path) -> None:
    assert str(tmp_path) in saving(tmp_path) and "the model is lost" in saving(None)
    assert "no model" in result(-1, 0, tmp_path, tmp_path) and "nothing was saved" in result(7, 9, None, None)
    (tmp_path / "model.safetensors").touch()
    first, model, again = result(7, 9, tmp_path, tmp_path).splitlines()
    assert first == "ended at version 7, 9 contributions" and model == f"the model: {tmp_path / 'model.safetensors'}"
    assert again.startswith("to go on with this run: ")
    assert again.endswith(f"zmqtrain-broker with the same options and --checkpoint {tmp_path}")
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1-of-2.safetensors")
    assert "part of the model" in result(7, 9, tmp_path, tmp_path)


def test_a_hub_makes_its_keys_at_the_first_start_and_one_for_all_pcs(tmp_path: Path) -> None:
    config = BrokerConfig(bind="tcp://*:0", keys=tmp_path / "keys")
    for _ in range(2):
        keys = open_keys(config)
        assert keys is not None and [entry.name for entry in keys.entries()] == ["hub", "lab"]
    assert open_keys(BrokerConfig(bind="tcp://*:0", insecure=True)) is None
    other = BrokerConfig(bind="tcp://*:0", keys=tmp_path / "none", shard="1/2", first="tcp://127.0.0.1:5555")
    with pytest.raises(ConfigError, match="copy the folder of the first here"):
        open_keys(other)


def test_a_folder_of_keys_that_cannot_be_made_says_what_can_be_done_instead(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--keys FOLDER.*--bind tcp://127\.0\.0\.1:5555.*--insecure"):
        open_keys(BrokerConfig(keys=tmp_path / "file" / "keys"))


def test_a_run_without_a_program_cannot_be_joined_by_the_command() -> None:
    with pytest.raises(ConfigError, match="zmqtrain-broker --program text"):
        load_run_program(RunSettings(), "", "tcp://hub:5555")


def test_an_error_in_the_programs_arguments_says_that_they_are_the_brokers() -> None:
    with pytest.raises(ConfigError, match=r"did you mean width\?.*the broker's"):
        load_run_program(RunSettings(program="text", program_arguments="widht=8"), "", "tcp://hub:5555")


def test_data_that_cannot_be_read_says_how_to_name_this_pcs_own_place(tmp_path: Path) -> None:
    settings = RunSettings(program="text", program_arguments=f"data={tmp_path / 'none'}")
    with pytest.raises(DataError, match=r"zmqtrain-node tcp://hub:5555 --data PLACE"):
        load_run_program(settings, "", "tcp://hub:5555")


def test_a_nodes_own_place_of_the_data_and_the_runs_seed_go_to_the_program(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    settings = RunSettings(program="text", program_arguments="data=/none,width=8,layers=1,heads=1,context=8", seed=7)
    program = load_run_program(settings, str(text), "tcp://hub:5555")
    assert (program.data, program.width, program.seed) == (str(text), 8, 7)  # type: ignore[attr-defined]


def test_a_node_without_a_hub_says_since_when_why_and_what_it_tries() -> None:
    assert say_alone("pc1", None) == ""
    said = say_alone("pc1", Solitude(75.0, "tcp://hub:5555", "nobody answers", 1234, 0.5))
    assert said == (
        "pc1 has had no hub for 1:15 (tcp://hub:5555: nobody answers); it tries again, and trains on alone: "
        "step 1,234, loss 0.500"
    )
    assert "loss" not in say_alone("pc1", Solitude(1.0, "", "", 0, math.nan))


def test_an_interruption_while_training_is_seen_at_the_next_step() -> None:
    interruption = Interruption()
    batches = interruption.watch(iter(range(3)))
    assert next(batches) == 0
    interruption.handle(signal.SIGINT, None)
    assert interruption()


def test_an_interruption_while_waiting_for_data_ends_the_waiting() -> None:
    interruption = Interruption()

    def waiting() -> Iterator[int]:
        yield 0
        interruption.handle(signal.SIGINT, None)

    assert list(interruption.watch(waiting())) == [0]
    assert interruption()


IN_A_CALL_OF_C = """
import hashlib, sys, threading
from zmqtrain.cli.ending import run_command
from zmqtrain.cli.node import Interruption

def command():
    interruption = Interruption()
    interruption.goodbyes.append({goodbye})
    interruption.install()
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # no handler of Python's runs meanwhile, as while XLA compiles

sys.exit(run_command("node", command, service=True))
"""


@pytest.mark.parametrize(
    ("goodbye", "signals", "code", "said"),
    [
        ("lambda: print('goodbye', flush=True)", 1, 0, "goodbye\n"),
        ("lambda: (print('goodbye', flush=True), threading.Event().wait())", 2, 130, "goodbye\n"),
        ("lambda: 1 / 0", 1, 0, ""),
    ],
)
def test_an_interruption_before_anything_is_trained_ends_the_node_though_its_main_thread_is_busy(
    goodbye: str, signals: int, code: int, said: str
) -> None:
    argv = [sys.executable, "-c", IN_A_CALL_OF_C.format(goodbye=goodbye)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            heard = process.stdout.readline() if signals > 1 else ""
            if signals > 1:
                process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, heard + out) == (code, said)
    assert "KeyboardInterrupt" not in err and ("Traceback" not in err or "1 / 0" in err or "ZeroDivision" in err)


def test_the_first_interrupt_is_told_and_the_handlers_are_put_back() -> None:
    told: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    with first_interrupt(lambda: told.append(True)) as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted() and told == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_node_says_last_whose_parameters_are_the_model() -> None:
    said = model_line("run-1", 7, True, "tcp://hub:5555", None)
    assert "run-1 is over: this node ended with its last parameters, of version 7" in said
    said = model_line("run-1", 7, False, "tcp://hub:5555", Path("lab.key_secret"))
    assert "left run-1 at version 7, and the run goes on: the model is the broker's" in said
    assert said.endswith("zmqtrain export tcp://hub:5555 --keys lab.key_secret")


def test_no_two_steps_begin_within_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("zmqtrain.cli.node.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    began = []
    for number in paced(range(4), 2.0):
        began.append(now)
        now += 5.0 if number == 1 else 0.5  # the second step is late; that is not made up for
    assert began == [100.0, 102.0, 107.0, 109.0]


def test_that_there_is_no_batch_now_is_passed_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("nothing is to be slowed down"))
    monkeypatch.setattr("zmqtrain.cli.node.time", clock)
    assert list(paced([1, None, None], 1.0)) == [1, None, None]


def test_every_node_has_cores_and_none_has_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 7}, raising=False)
    assert [share_of_cores(index, 3) for index in range(3)] == [{2}, {3}, {5}]
    assert [share_of_cores(index, 2) for index in range(2)] == [{2, 3}, {5, 7}]
    assert [share_of_cores(index, 6) for index in range(6)] == [{2}, {3}, {5}, {7}, {2}, {3}]


def test_a_departure_says_how_and_with_what_words() -> None:
    assert str(Departure("node-1", -9, "")) == "node-1 ended by signal 9"
    assert str(Departure("node-2", 2, "no data")) == "node-2 ended with exit code 2: no data"


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zmqtrain.cli.import_module", interrupted)
    assert main(["status", "tcp://hub:5555"]) == broker_main() == node_main() == 0


def test_a_broker_that_is_interrupted_says_what_becomes_of_its_nodes() -> None:
    kept = Path("kept")
    assert ending(None, kept) == "stopping: all accepted deltas are saved (Ctrl-C again to quit at once)"
    roster = Roster(3, (), "", 0, 0, 0, 0, 0.0, {}, -1, hub={"term": 0, "standby": "tcp://pc2:5555"})
    assert "the standby at tcp://pc2:5555 takes over, if it is in step" in ending(roster, kept)
    said = ending(replace_fields(roster, hub={}, members=({"name": "pc-1"},)), kept)
    assert "The nodes train on alone until you end them: Ctrl-C at each" in said
    assert "started again with --checkpoint kept" in said and "`zmqtrain stop` in place of Ctrl-C" in said
    assert "nothing is saved" in ending(replace_fields(roster, hub={}), None)


def test_a_run_without_an_end_says_so_in_its_first_line_and_how_it_is_ended(tmp_path: Path) -> None:
    here = "tcp://127.0.0.1:5555"
    first = greeting(BrokerConfig(bind=here), "run-1", -1, here, None).splitlines()[0]
    assert first.endswith("; the run has no end (--units 0)")
    assert "no end" not in greeting(BrokerConfig(bind=here, units=4), "run-1", -1, here, None)
    assert stop_line(here, None).endswith(f"zmqtrain stop {here}")
    keys = KeyFolder(tmp_path / "keys")
    assert stop_line(here, keys).endswith(f"zmqtrain stop {here} --keys {tmp_path / 'keys' / 'hub.key_secret'}")


def test_a_run_that_had_ended_and_is_started_again_says_what_to_raise() -> None:
    assert "all its 1,200 data units are done, at version 7" in (said := finished("run-1", 7, 1200))
    assert "raise --units (as --units 2400; 0: no end)" in said


def test_a_window_that_is_closed_ends_a_command_in_order_and_is_never_the_second_signal() -> None:
    told: list[bool] = []
    before = signal.getsignal(signal.SIGHUP)
    with first_interrupt(lambda: told.append(True)) as interrupted:
        for _ in range(2):  # the shell sends one, and the system another
            signal.raise_signal(signal.SIGHUP)
        assert interrupted() and told == [True]
    assert signal.getsignal(signal.SIGHUP) is before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert end_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_node_whose_window_is_closed_says_goodbye() -> None:
    argv = [sys.executable, "-c", IN_A_CALL_OF_C.format(goodbye="lambda: print('goodbye', flush=True)")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGHUP)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "goodbye\n")


def test_a_command_whose_run_an_operator_has_ended_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    def ended() -> int:
        raise RunStopped("pc-1 ends: an operator has ended the run", "stopped")

    assert run_command("node", ended, service=True) == 0
    assert capsys.readouterr().err == "node: pc-1 ends: an operator has ended the run\n"


class XlaRuntimeError(RuntimeError):
    """As jax names it."""


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError("Unable to allocate 7 EiB"), XlaRuntimeError("RESOURCE_EXHAUSTED: 1TB\nmore")]
)
def test_too_little_memory_is_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def lacking() -> int:
        raise error

    assert run_command("zmqtrain-node", lacking, service=True) == 2
    said = capsys.readouterr().err
    assert "too little memory" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["width=1000000000", "layers=1000000000", "batch=1000000000", f"seed={2**80}", "width=800000"]
)
@pytest.mark.parametrize("program", ["text", "image"])
def test_a_program_with_absurd_numbers_is_refused_by_name(program: str, text: str) -> None:
    if program == "image" and text.startswith("layers"):
        return
    settings = RunSettings(program=program, program_arguments=text)
    with pytest.raises(ConfigError, match=text.partition("=")[0]):
        load_run_program(settings, "", "tcp://hub:5555")


def test_what_a_peer_wrote_in_an_error_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> int:
        raise JoinRefused("the broker says \x1b[2J[/red]", "run")

    assert run_command("zmqtrain-node", refused, service=True) == 78
    assert capsys.readouterr().err == "zmqtrain-node: the broker says ?[2J[/red]\n"


@pytest.mark.parametrize("driver", [True, False])
def test_the_nodes_of_one_pc_share_its_card(driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(local.subprocess, "Popen", start)
    monkeypatch.setattr(installed, "has_nvidia_driver", lambda: driver)
    federation = local.Federation(RunSettings(program="text"), 2, pin=False)
    monkeypatch.setattr(federation, "_brokers", [SimpleNamespace(address="tcp://127.0.0.1:5555")])
    federation._start_node(0).errors.close()
    (command,) = commands
    assert ("XLA_PYTHON_CLIENT_PREALLOCATE=false" in command) is driver and sys.executable in command[:3]
