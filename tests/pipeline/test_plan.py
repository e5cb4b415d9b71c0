"""`zmqtrain plan --tokens`: the row of the design, what it says of memory and of the wire, and wrong questions."""

from __future__ import annotations

import json

import pytest

from zmqtrain.cli import main

ASK = ["plan", "--params", "1B", "--nodes", "4", "--memory", "6GB", "--tokens", "1024"]


def asked(capsys, *more):
    code = main([*ASK, "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_the_plan_of_the_design(capsys):
    assert main(ASK) == 0
    out = capsys.readouterr().out
    for words in ("1 of 4 nodes", "efficiency  0.888", "4.2 MB (bf16), 36 ms", "node-3", "textbook", "Worth it"):
        assert words in out


def test_json_holds_the_row_of_the_design(capsys):
    code, document = asked(capsys)
    (pipeline,) = document["pipelines"]
    assert code == 0 and document["fits"] and not document["unused"]
    assert pipeline["efficiency"] == pytest.approx(0.89, abs=0.01)
    assert [stage["most_in_flight"] for stage in pipeline["stages"]] == [9, 7, 5, 1]
    assert all(stage["memory_bytes"] <= 5.5e9 for stage in pipeline["stages"])
    assert max(pipeline["port_use"]) == pytest.approx(0.31, abs=0.01)
    expected = {"1f1b, textbook": (0.73, 0.81), "1f1b, roomy": (0.89, 0.90), "2bw, roomy": (0.98, 0.98)}
    for schedule, efficiencies in expected.items():
        assert tuple(document["schedules"][schedule].values()) == pytest.approx(efficiencies, abs=0.02)


def test_a_model_that_fits_one_node_is_no_pipeline(capsys):
    code, document = asked(capsys, "--memory", "24GB")
    assert code == 0 and [len(one["stages"]) for one in document["pipelines"]] == [1] * 4
    assert "not worth it" in document["advice"] and "--step-ms" in document["advice"]


def test_a_pipeline_that_is_asked_for_and_costs_speed_is_not_worth_it(capsys):
    _, document = asked(capsys, "--memory", "24GB", "--pipeline", "4")
    assert [len(one["stages"]) for one in document["pipelines"]] == [4]
    assert document["advice"].startswith("Not worth it") and "4 of 1 node" in document["advice"]


def test_a_wire_that_is_slower_than_the_nodes_is_named(capsys):
    code, document = asked(capsys, "--params", "100M", "--memory", "1.2GB", "--link", "100mbit")
    (pipeline,) = document["pipelines"]
    assert code == 0 and pipeline["wire_bound"] and pipeline["efficiency"] < 0.1
    assert document["advice"].startswith("Not worth it")


def test_int8_halves_what_goes_over_the_wire(capsys):
    (bf16,), (int8,) = (asked(capsys, "--boundary", codec)[1]["pipelines"] for codec in ("bf16", "int8"))
    ports = [max(stage["port_seconds"] for stage in one["stages"]) for one in (bf16, int8)]
    assert ports[1] == pytest.approx(ports[0] / 2, rel=0.05) and int8["efficiency"] > bf16["efficiency"]


def test_nodes_may_differ_in_speed_and_memory(capsys):
    _, document = asked(capsys, "--memory", "12GB,6GB,6GB,12GB", "--flops", "20T,10T,10T,20T", "--pipeline", "4")
    (pipeline,) = document["pipelines"]
    layers = {stage["pc"]: stage["end"] - stage["begin"] for stage in pipeline["stages"]}
    assert min(layers["node-0"], layers["node-3"]) > max(layers["node-1"], layers["node-2"])


def test_of_pipelines_of_different_lengths_it_says_which_one_the_figures_are_of(capsys):
    assert main([*ASK, "--nodes", "5", "--memory", "24GB,6GB,6GB,6GB,6GB"]) == 0
    assert "pipeline 1, the longest" in " ".join(capsys.readouterr().out.split())


def test_a_head_makes_its_stage_slower_and_a_tied_one_costs_a_sum(capsys):
    _, apart = asked(capsys, "--vocabulary", "32000")
    _, tied = asked(capsys, "--vocabulary", "32000", "--tied", "--memory", "7GB")
    assert apart["pipelines"][0]["stages"][-1]["end"] - apart["pipelines"][0]["stages"][-1]["begin"] <= 5
    seconds = [sum(stage["tied_seconds"] for stage in one["pipelines"][0]["stages"]) for one in (apart, tied)]
    assert seconds == [0.0, pytest.approx(4 * 32000 * 2048 / 117e6)]
    main([*ASK, "--vocabulary", "32000", "--tied", "--memory", "7GB"])
    out = capsys.readouterr().out
    assert "tied leaves" in out and "embedding, 0" in out and "head" in out


def test_several_cards_in_a_node_share_its_stage(capsys):
    code, document = asked(capsys, "--nodes", "2", "--cards", "2")
    (pipeline,) = document["pipelines"]
    assert code == 0 and all(stage["sharding"] in ("fsdp", "tensor") for stage in pipeline["stages"])
    assert main([*ASK, "--nodes", "2", "--cards", "2"]) == 0
    assert "sharded by" in capsys.readouterr().out


def test_nodes_that_cannot_hold_the_model_are_the_exit_code_1(capsys):
    code, document = asked(capsys, "--params", "10B")
    assert code == 1 and not document["fits"] and document["segment"] == ""
    assert main([*ASK, "--layers", "2", "--memory", "3GB"]) == 1
    out = capsys.readouterr().out
    assert "'layer 0'" in out and "fits no PC" in out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--memory", ""], "--memory 6GB"),
        (["--memory", "6GB,6GB"], "one for all 4 nodes"),
        (["--memory", "6GB,6GB,lots,6GB"], "memory is written like 6GB"),
        (["--flops", "fast"], "flops is written like"),
        (["--tokens", "-1"], "tokens must be at least 0"),
        (["--boundary", "int7"], "there is no 'int7'"),
        (["--micro-batches", "3", "--pipeline", "4"], "fewer than the 4 stages"),
        (["--pipeline", "5"], "there are 4"),
        (["--tied"], "--vocabulary"),
        (["--vocabulary", "9000000"], "say another width or vocabulary"),
        (["--cards", "0"], "cards must be at least 1"),
    ],
)
def test_a_wrong_question_is_one_sentence_and_the_exit_code_2(wrong, words, capsys):
    assert main([*ASK, *wrong]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


def test_without_tokens_a_plan_needs_the_time_of_a_step(capsys):
    assert main(["plan", "--params", "1B", "--nodes", "4"]) == 2
    err = capsys.readouterr().err
    assert "--step-ms" in err and "--tokens" in err
