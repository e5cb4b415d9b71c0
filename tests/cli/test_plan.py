"""The command `zmqtrain plan`: what it prints, what it says of memory, and what to a wrong question."""

from __future__ import annotations

import json

import pytest

from zmqtrain.cli import main
from zmqtrain.cli.settings import read_config
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec

ASK = ["plan", "--params", "25M", "--nodes", "4", "--step-ms", "50"]


def asked(capsys, *more):
    code = main([*ASK, "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_the_tables_hold_the_plan_its_variants_and_the_memory(capsys):
    assert main([*ASK, "--link", "1gbit"]) == 0
    out = capsys.readouterr().out
    for words in (
        "to a loss", "times as fast as one PC", "why", "k, d", "outer", "hub's port", "efficiency", "age", "speed-up",
        "other brokers and hubs", "memory of a node", "anchor",
    ):  # fmt: skip
        assert words in out


def test_the_line_to_type_is_one_that_a_broker_takes(capsys):
    from zmqtrain.cli.broker import BrokerConfig

    _, document = asked(capsys)
    program, *argv = document["plan"]["command"].split()
    config = read_config(BrokerConfig, program, [*argv, "--insecure"])
    assert isinstance(config, RunSettings)
    assert (config.every, config.delay) == (document["plan"]["every"], document["plan"]["delay"])
    chosen = (config.codec, config.broadcast_codec, config.outer)
    assert chosen == tuple(document["plan"][name] for name in ("codec", "broadcast_codec", "outer"))
    assert (
        config.carries_all
        and config.fragments_of((LeafSpec("w", (25_000_000,), "float32"),)) == document["plan"]["fragments"]
    )


def test_fragments_that_are_told_take_turns_and_stand_in_the_line_to_type(capsys):
    from zmqtrain.cli.broker import BrokerConfig

    _, document = asked(capsys, "--fragments", "3")
    program, *argv = document["plan"]["command"].split()
    config = read_config(BrokerConfig, program, [*argv, "--insecure"])
    assert config.fragments == 3 == document["plan"]["fragments"] and not config.carries_all


def test_json_holds_the_same_for_the_plan_and_each_variant(capsys):
    code, document = asked(capsys, "--codec", "ternary", "--fragments", "4", "--shards", "2")
    assert code == 0
    assert len(document["variants"]) == 5
    assert document["variants"][1] == {key: value for key, value in document["plan"].items() if key != "command"}
    assert document["plan"]["codec"] == "ternary" and 0.8 < document["plan"]["efficiency"] <= 1
    assert 1 < document["plan"]["speedup"] < document["plan"]["ideal_speedup"] < 4


def test_ones_own_measured_costs_count(capsys):
    slow = asked(capsys, "--codec", "ternary", "--fragments", "1", "--node-ns", "40", "--codec-on", "host")[1]["plan"]
    assert slow["every"] == 21 and slow["busiest"] == "a node's codec"
    usual, held = (asked(capsys, "--codec", "ternary", *more)[1]["plan"] for more in ([], ["--held-ms", "60"]))
    assert held["efficiency"] < usual["efficiency"] and held["speedup"] < usual["speedup"]


def test_a_card_that_is_too_small_is_the_exit_code_1_with_what_would_fit(capsys):
    code, document = asked(capsys, "--memory", "1.8GB", "--activations", "600MB", "--fragments", "1")
    assert code == 1 and not document["memory"]["fits"]
    assert "It would with" in document["memory"]["advice"]
    code, document = asked(
        capsys, "--memory", "1.8GB", "--activations", "600MB", "--fragments", "1", "--anchor", "host"
    )
    assert code == 0 and document["memory"]["fits"]


def test_half_precision_parameters_and_an_optimizer_without_state_need_less(capsys):
    full = asked(capsys)[1]["memory"]["device_bytes"]
    assert asked(capsys, "--dtype", "bfloat16")[1]["memory"]["device_bytes"] < full
    assert asked(capsys, "--optimizer-slots", "0")[1]["memory"]["device_bytes"] < full


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--link", "fast"], "link is written like 1gbit, 100mbit or 12.5MB/s, not 'fast'"),
        (["--params", "lots"], "params is written like 100M"),
        (["--codec", "tern"], "there is no 'tern' (did you mean ternary?); a codec is one of float32"),
        (["--nodes", "0"], "nodes must be at least 1, got 0"),
        (["--step-ms", "0"], "step_ms must be more than 0"),
        (["--share", "2"], "0 < share <= 1"),
        (["--shards", "9", "--shards-on-nodes"], "9 brokers do not find a node each among 4"),
        (["--node-ns", "-3"], "node_ns must be at least 0"),
        (["--optimizer-slots", "-1"], "optimizer_slots must be at least 0"),
        (["--batches", "0"], "batches must be at least 1, got 0"),
        (["--critical", "-1"], "critical is a batch size, in batches of one node: more than 0, not -1"),
        (["--memory", "some"], "memory is written like 6GB"),
    ],
)
def test_a_wrong_question_is_one_sentence_and_the_exit_code_2(wrong, words, capsys):
    assert main([*ASK, *wrong]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err
