"""What a user types: flags over file over defaults, checked once, refused with what to type instead."""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import fields
from pathlib import Path

import pytest

from zmqtrain.cli import settings as reading
from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.chaos import ChaosConfig
from zmqtrain.cli.demo import DemoConfig
from zmqtrain.cli.doctor import DoctorConfig
from zmqtrain.cli.export import ExportConfig, MergeConfig
from zmqtrain.cli.local import LocalConfig
from zmqtrain.cli.node import NodeConfig
from zmqtrain.cli.operate import ListConfig, NewConfig, PromoteConfig, RevokeConfig, StatusConfig, StopConfig
from zmqtrain.cli.plan import PlanConfig
from zmqtrain.cli.programs import ProgramsConfig
from zmqtrain.cli.settings import check_host, read_config
from zmqtrain.cli.sim import SimConfig
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_DELAY, AUTO_EVERY, AUTO_PIPELINE, AUTO_SHARDS, FITTED, FIXED, RunSettings
from zmqtrain.sim.reading import read_scenario
from zmqtrain.train.synchronous import Allreduce, Server

HUB = "tcp://192.168.1.10:5555"


def broker(*argv: str) -> BrokerConfig:
    return read_config(BrokerConfig, "zmqtrain-broker", argv)


def write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_counts_more_than_the_file_and_the_file_more_than_the_default(tmp_path: Path) -> None:
    config = broker("--config", write(tmp_path, "every = 16\ndelay = 5\ninsecure = true\n"), "--every", "32")
    assert (config.every, config.delay, config.insecure, config.seed) == (32, 5, True, 0)


def test_a_flag_takes_back_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, 'insecure = true\nbind = "tcp://127.0.0.1:6000"\n')
    assert broker(f"--config={path}", "--no-insecure").insecure is False


def test_a_run_that_is_recorded_has_one_broker_and_several_that_are_asked_for_cannot_be_recorded() -> None:
    many = ("--insecure", "--start-nodes", "8")
    assert (broker(*many).shards, broker(*many, "--record", "hub.jsonl").shards) == (AUTO_SHARDS, 1)
    with pytest.raises(ConfigError, match="cannot be recorded"):
        broker(*many, "--shards", "9", "--record", "hub.jsonl")


def test_nothing_told_is_auto_with_several_brokers_too_and_what_holds_in_strict_mode_is_fixed(tmp_path: Path) -> None:
    words = [word for name in FITTED for word in (f"--{name.replace('_', '-')}", "auto")]
    several = broker("--insecure", "--shards", "2", "--delay", "auto"), broker("--insecure", "--shard", "0/2")
    for usual in (broker("--insecure"), broker("--insecure", *words), *several):
        assert usual.is_planned and {name: getattr(usual, name) for name in FITTED} == FITTED
    file = write(tmp_path, "".join(f'{name} = "auto"\n' for name in FITTED))
    assert broker("--insecure", "--config", file).to_dict() == RunSettings().to_dict()
    strict = broker("--insecure", "--mode", "strict", "--release", "all", "--every", "auto")
    assert not strict.is_planned and {name: getattr(strict, name) for name in FITTED} == FIXED


def test_every_field_is_a_key_of_the_file(tmp_path: Path) -> None:
    known = [field for field in fields(BrokerConfig) if field.name != "config"]
    texts = {str: '"{}"', bool: "{}"}
    lines = [
        f"{field.name} = " + texts.get(type(field.default), "{}").format(str(field.default).lower())
        for field in known
        if field.default is not None and field.name != "insecure"
    ]
    lines += ["insecure = false", 'checkpoint = "kept"', 'keys = "folder"']
    config = broker("--config", write(tmp_path, "\n".join(lines)))
    assert config.checkpoint == Path("kept") and config.keys == config.key_folder == Path("folder")
    assert config.to_dict() == RunSettings().to_dict()


def test_which_of_several_shards_a_broker_is_and_how_many_there_are() -> None:
    first, other = broker("--insecure", "--shard", "0/4"), broker("--insecure", "--shard", "3/4", "--first", HUB)
    assert (first.shard_index, first.shards, other.shard_index, other.shards) == (0, 4, 3, 4)
    assert broker("--insecure").shard_index == 0 and broker("--insecure", "--shards", "4").to_dict() == first.to_dict()


def test_what_is_merged_does_not_overwrite_a_file(tmp_path: Path) -> None:
    config = read_config(MergeConfig, "zmqtrain merge", ["a", "b", "--out", str(tmp_path / "model.safetensors")])
    assert config.parts == (Path("a"), Path("b"))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="exists: name another file"):
        read_config(MergeConfig, "zmqtrain merge", ["a", "--out", str(tmp_path / "model.safetensors")])


def test_a_key_of_the_file_may_be_written_as_its_flag_is(tmp_path: Path) -> None:
    config = broker("--config", write(tmp_path, 'insecure = true\nbroadcast-codec = "bf16"\n'))
    assert config.broadcast_codec == "bf16"


def test_the_programs_arguments_may_be_a_table(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'insecure = true\nprogram = "text"\n[program_arguments]\nwidth = 32\ntied = false\ndata = "a b"\n'
    )
    assert broker("--config", path).program_arguments == "width=32,tied=false,data=a b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("evry = 3", ["'evry'", "every"]),
        ('every = "3"', ["every", "whole number", "'3'"]),
        ("every = true", ["every", "whole number"]),
        ('insecure = "yes"', ["insecure", "true or false"]),
        ('mode = "loose"', ["mode", "'default'", "'strict'", "'loose'"]),
        ("checkpoint = 3", ["checkpoint", "a text"]),
        ("every = ", ["no TOML", "every = 16"]),
        ('[program_arguments]\ndata = "a,b"', ["program_arguments.data", "commas"]),
        ('config = "other.toml"', ["'config'"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name_and_place(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        broker("--config", path)
    message = str(caught.value)
    assert path in message and "\n" not in message
    assert all(word in message for word in words), message


def test_an_old_name_in_a_file_is_refused_with_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reading.RENAMED, "evry", "every")
    with pytest.raises(ConfigError, match="'evry' is now 'every'"):
        broker("--config", write(tmp_path, "evry = 3"))
    for old, new in reading.RENAMED.items():
        known = {field.name for kind in (BrokerConfig, NodeConfig, LocalConfig) for field in fields(kind)}
        assert old not in known and new in known


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        broker("--config", str(tmp_path / "none.toml"))


def test_the_network_is_not_listened_on_without_keys_but_by_an_explicit_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/teacher"))
    assert broker().key_folder == Path("/home/teacher/.config/zmqtrain/keys")
    assert broker("--keys", "folder").key_folder == Path("folder")
    assert broker("--insecure").key_folder is None
    assert broker("--bind", "tcp://127.0.0.1:5555").key_folder is None
    assert broker("--bind", "tcp://127.0.0.1:5555", "--keys", "folder").key_folder == Path("folder")
    with pytest.raises(ConfigError, match="leave one out"):
        broker("--insecure", "--keys", "folder")


def test_pcs_of_a_pipeline_may_be_auto_in_a_flag_and_in_a_file(tmp_path: Path) -> None:
    flags = [broker("--insecure", "--pipeline", word).pipeline for word in ("auto", "2", "0")]
    file = broker("--config", write(tmp_path, 'insecure = true\npipeline = "auto"\n'))
    assert [*flags, file.pipeline] == [AUTO_PIPELINE, 2, 0, AUTO_PIPELINE]


def test_k_and_d_may_be_auto_in_a_flag_and_in_a_file(tmp_path: Path) -> None:
    flags = broker("--insecure", "--every", "auto", "--delay", "auto")
    file = broker("--config", write(tmp_path, 'insecure = true\nevery = "auto"\ndelay = 7\n'))
    assert (flags.every, flags.delay, file.every, file.delay) == (AUTO_EVERY, AUTO_DELAY, AUTO_EVERY, 7)
    assert flags.is_planned and file.is_planned and RunSettings.from_dict(file.to_dict()).is_planned


@pytest.mark.parametrize("flag", [("--every", "0"), ("--delay", "-1"), ("--every", "often"), ("--shards", "0")])
def test_k_and_d_are_numbers_of_steps_or_auto(flag: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        broker("--insecure", *flag)
    assert flag[0].strip("-") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "argv", "words"),
    [
        (BrokerConfig, ["--insecure", "--link", "1gigabyte"], "link is written like 1gbit, 100mbit or 12.5MB/s"),
        (BrokerConfig, ["--insecure", "--share", "0"], "0 < share <= 1"),
        (NodeConfig, [HUB, "--link", "fast"], "link is written like"),
        (NodeConfig, [HUB, "--share", "1.5"], "0 < share <= 1"),
        (BrokerConfig, ["--insecure", "--checkpoint-every", "0"], "checkpoint_every must be at least 1 version"),
        (
            BrokerConfig,
            ["--insecure", "--checkpoint", "a", "--no-checkpoint"],
            "nothing is saved, and --checkpoint where",
        ),
        (LocalConfig, ["--checkpoint", "a", "--no-checkpoint"], "leave one out"),
        (BrokerConfig, ["--insecure", "--from", "a", "--initial", "mean"], "initial 'mean' that its nodes give them"),
        (LocalConfig, ["--from", "a", "--shards", "2"], "one broker that has the whole model"),
        (BrokerConfig, ["--insecure", "--from", "a", "--record", "b"], "leave --record or --from out"),
        (BrokerConfig, ["--insecure", "--from", "a", "--standby", HUB], "is to be said where that is started"),
        (BrokerConfig, ["--insecure", "--bind", "hub"], "tcp://HOST:PORT"),
        (BrokerConfig, ["--insecure", "--broadcast-codec", "terniary"], "broadcast_codec = 'terniary'.*ternary"),
        (BrokerConfig, ["--insecure", "--release", "most"], "release = 'most'.*quorum"),
        (LocalConfig, ["--outer", "adagrad"], "outer = 'adagrad'.*nesterov"),
        (NodeConfig, ["hub"], "tcp://HOST:PORT"),
        (NodeConfig, [HUB, "--wait-seconds", "-1"], "wait_seconds"),
        (NodeConfig, [HUB, "--pace-seconds", "nan"], "pace_seconds"),
        (NodeConfig, [HUB, "--induce", "ceder"], "induce = 'ceder': .*niagara, cedar, mixture="),
        (LocalConfig, ["--nodes", "0"], "nodes must be at least 1"),
        (LocalConfig, ["--nodes", "2", "--start-nodes", "3"], "--nodes 3"),
        (LocalConfig, ["--program", ""], "--program text"),
        (StatusConfig, ["hub"], "tcp://HOST:PORT"),
        (DemoConfig, ["--nodes", "1"], "nodes must be at least 2"),
        (BrokerConfig, ["--insecure", "--shard", "2"], "as 0/4 for the first of four, got '2'"),
        (BrokerConfig, ["--insecure", "--shard", "4/4"], "of 4 shards the first is 0 and the last is 3"),
        (BrokerConfig, ["--insecure", "--shard", "0/0"], "shard 0/0"),
        (BrokerConfig, ["--insecure", "--shard", "0/4", "--shards", "2"], "says 4 shards, shards says 2"),
        (BrokerConfig, ["--insecure", "--shard", "1/4"], "needs the address of the first broker.*--first tcp://HOST"),
        (BrokerConfig, ["--insecure", "--shard", "1/4", "--first", "hub"], "tcp://HOST:PORT"),
        (BrokerConfig, ["--insecure", "--shard", "1/4", "--first", HUB, "--address", "me"], "tcp://HOST:PORT"),
        (BrokerConfig, ["--insecure", "--shard", "0/4", "--first", HUB], "first is for the other brokers"),
        (BrokerConfig, ["--insecure", "--first", HUB], "first is for the other brokers"),
        (BrokerConfig, ["--insecure", "--shard", "1/4", "--first", HUB, "--every", "4"], "leave every out here"),
        (BrokerConfig, ["--insecure", "--shard", "0/4", "--record", "file"], "leave --record out"),
        (BrokerConfig, ["--insecure", "--shard", "0/2", "--initial", "mean"], "say --initial best"),
        (BrokerConfig, ["--insecure", "--shard", "0/2", "--initial", "mean"], "of 2 brokers none has one"),
        (NodeConfig, [HUB, "--exchange", "ring"], "choose one of hub, allreduce:ring"),
        (
            NodeConfig,
            [HUB, "--exchange", "allreduce:rong"],
            "exchange = 'allreduce:rong'.*choose one of auto, naive, ring",
        ),
        (NodeConfig, [HUB, "--exchange", "allreduce:ring,codec=int9"], "exchange = 'allreduce:ring,codec=int9'.*int8"),
        (NodeConfig, [HUB, "--exchange", "allreduce:codec=int8;*bias=bf16"], "there is no 'int8;'|int8;\\*bias"),
        (NodeConfig, [HUB, "--exchange", "server:often"], "exchange = 'server:often'.*bsp, async"),
        (NodeConfig, [HUB, "--exchange", "server:optimizer=adma"], "exchange = 'server:optimizer=adma'.*adam"),
        (NodeConfig, [HUB, "--shards", "2"], "shards is given with --exchange server"),
        (NodeConfig, [HUB, "--exchange", "server:shards=2", "--shards", "4"], "say two numbers of shards"),
        (NodeConfig, [HUB, "--exchange", "allreduce", "--record", "file"], "leave --record out"),
        (LocalConfig, ["--exchange", "ring"], "choose one of hub, allreduce"),
        (BrokerConfig, ["--insecure", "--codec", "automatic"], "codec = 'automatic'.*ternary"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(kind: type, argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(kind, "zmqtrain", argv)


def test_a_node_trains_in_lockstep_where_it_is_told_so_with_the_shards_that_it_is_told() -> None:
    assert read_config(NodeConfig, "zmqtrain-node", [HUB]).lockstep is None
    ring = read_config(NodeConfig, "zmqtrain-node", [HUB, "--exchange", "allreduce:ring"]).lockstep
    assert ring == Allreduce("ring")
    server = read_config(NodeConfig, "zmqtrain-node", [HUB, "--exchange", "server:async", "--shards", "4"]).lockstep
    assert server == Server("async", shards=4)


def test_a_run_in_lockstep_on_this_pc_begins_with_all_its_nodes() -> None:
    assert read_config(LocalConfig, "zmqtrain", ["--nodes", "4"]).start_nodes == 1
    assert read_config(LocalConfig, "zmqtrain", ["--nodes", "4", "--exchange", "allreduce"]).start_nodes == 4
    several = read_config(LocalConfig, "zmqtrain", ["--nodes", "4", "--exchange", "server", "--start-nodes", "2"])
    assert several.start_nodes == 2


@pytest.mark.parametrize("kind", [BrokerConfig, NodeConfig, LocalConfig, StatusConfig, DemoConfig])
def test_help_says_what_every_flag_is_for(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_config(kind, "zmqtrain", ["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    named = {"from_file": "from"}
    flags = [named.get(one.name, one.name.replace("_", "-")) for one in fields(kind) if one.name != "hub"]
    assert all(f"--{flag}" in text or f"--no-{flag}" in text for flag in flags)  # what is on is turned off by a flag
    assert "--version" in text


EVERY_COMMAND = [BrokerConfig, ChaosConfig, DemoConfig, DoctorConfig, LocalConfig, MergeConfig, NodeConfig, PlanConfig]
EVERY_COMMAND += [ExportConfig, ListConfig, NewConfig, ProgramsConfig, PromoteConfig, RevokeConfig, SimConfig]
EVERY_COMMAND += [StatusConfig, StopConfig]


@pytest.mark.parametrize("kind", EVERY_COMMAND)
def test_help_breaks_no_word_at_the_edge_of_80_columns(
    kind: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        read_config(kind, "zmqtrain", ["--help"])
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert not re.search(r"[a-z]-\n *[a-z]", text), "no word is divided at its hyphen"


def test_help_fills_what_the_source_has_in_several_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        broker("--help")
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("--release")]
    paragraph = lines[first : first + 5]
    assert min(map(len, paragraph[1:])) > 40, paragraph


def test_a_flag_that_does_not_exist_ends_with_2_and_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        broker("--evry", "3")
    assert end.value.code == 2
    assert "--every" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "known"), [(socket.EAI_NONAME, False), (socket.EAI_AGAIN, True)])
def test_a_host_that_nobody_knows_is_refused_at_once(number: int, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(host: str, port: None) -> list[object]:
        raise socket.gaierror(number, host)

    check_host("tcp://127.0.0.1:5555")
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    with contextlib.nullcontext() if known else pytest.raises(ConfigError, match="no host named 'hub'"):
        check_host("tcp://hub:5555")


def test_of_several_hosts_one_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"pc2"}

    def ask(host: str, port: None) -> list[object]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, host)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    check_host("tcp://pc1:5555,tcp://pc2:5555")
    known.clear()
    with pytest.raises(ConfigError, match="no host named 'pc2'"):
        check_host("tcp://pc1:5555,tcp://pc2:5555")


def test_a_standby_needs_the_address_of_another_broker_and_no_setting_of_the_run() -> None:
    config = broker("--standby", HUB, "--insecure", "--takeover-seconds", "5", "--address", "tcp://10.0.0.2:5555")
    assert (config.standby, config.takeover_seconds, config.address) == (HUB, 5.0, "tcp://10.0.0.2:5555")
    for wrong, said in (
        (["--every", "4"], "leave every out"),
        (["--shard", "1/2", "--first", HUB], "leave --shard or --standby out"),
        (["--first", HUB], "first is for the other brokers"),
        (["--record", "x.jsonl"], "leave --record out"),
        (["--takeover-seconds", "0"], "takeover_seconds"),
        (["--address", "here"], "here"),
    ):
        with pytest.raises(ConfigError, match=said):
            broker("--standby", HUB, "--insecure", *wrong)
    with pytest.raises(ConfigError, match="no address"):
        broker("--standby", "pc1", "--insecure")


def test_promote_needs_an_address() -> None:
    assert read_config(PromoteConfig, "zmqtrain promote", [HUB]).hub == HUB
    with pytest.raises(ConfigError):
        read_config(PromoteConfig, "zmqtrain promote", ["pc2"])


DEEP = ("every = " + "[" * 10**5, "program_arguments = " + "{a=" * 10**4, "x" + ".x" * 2000 + " = 1")


@pytest.mark.parametrize("text", DEEP)
def test_a_file_that_is_nested_deeply_is_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "deep.toml"
    path.write_text(text)
    for read in (lambda: broker("--config", str(path)), lambda: read_scenario(path)):
        with pytest.raises(ConfigError) as raised:
            read()
        assert len(str(raised.value)) < 2000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heartbeat_seconds", "nan"), ("lost_seconds", "nan"), ("evaluate_seconds", "inf"), ("lost_seconds", "1e300"),
        ("fragments", "1000000000"), ("shards", "1000000000"), ("seed", str(2**80)), ("units", str(2**80)),
        ("every", str(10**30)), ("checkpoint_keep", str(10**23)), ("wait_seconds", "inf"), ("takeover_seconds", "nan"),
        ("max_staleness", str(10**30)), ("start_nodes", str(10**30)), ("elastic", "nan"), ("share", "nan"),
    ],
)  # fmt: skip
def test_a_setting_that_is_no_number_or_absurd_is_refused_by_name(tmp_path, name, value):
    standby = ["--standby", "tcp://127.0.0.1:1"] if name in ("takeover_seconds", "wait_seconds") else []
    with pytest.raises((ConfigError, SystemExit)) as raised:
        read_config(BrokerConfig, "zmqtrain-broker", [*standby, f"--{name.replace('_', '-')}", value])
    if isinstance(raised.value, ConfigError):
        assert name in str(raised.value) and len(str(raised.value)) < 300
    path = tmp_path / "settings.toml"
    path.write_text(f"{'standby = ' + repr(standby[1]) if standby else ''}\n{name} = {value}\n")
    with pytest.raises(ConfigError, match=name):
        read_config(BrokerConfig, "zmqtrain-broker", ["--config", str(path)])


def test_settings_in_python_are_checked_as_those_that_are_typed() -> None:
    assert RunSettings(every="auto", elastic=1) == RunSettings()  # type: ignore[arg-type]
    for wrong, words in (
        ({"every": "often"}, "a whole number"),
        ({"codec": 5}, "a text"),
        ({"units": True}, "a whole"),
    ):
        with pytest.raises(ConfigError, match=words):
            RunSettings(**wrong)  # type: ignore[arg-type]
