"""What a run came to: presences, faults and their cost, and runs beside each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from recorded import BATCH, broker, write_run

import zmqtrain as zt
from zmqtrain.monitor.records import Record, record, write_records
from zmqtrain.report.summary import Summary, common_loss, software


def summary(folder: Path, records: list[Record]) -> Summary:
    write_records(folder / "broker.jsonl", records)
    return Summary(zt.records.load(folder), "it")


def event(seconds: float, node: str, what: str) -> Record:
    return record("membership", seconds, node=node, what=what, peer=f"{node}#a", text="why")


def test_time_begins_when_the_first_node_trains(tmp_path: Path) -> None:
    one = summary(tmp_path, broker(["pc1", "pc2"], seconds=30))
    assert one.began == pytest.approx(1.1)
    assert one.seconds == pytest.approx(28.9)


def test_figures_of_a_run_and_of_its_nodes(tmp_path: Path) -> None:
    one = Summary(zt.records.load(write_run(tmp_path / "run", ["pc1", "pc2"], seconds=30)), "it")
    assert one.samples == 2 * BATCH * 29
    assert (one.bytes_up, one.bytes_down) == (60_000, 180_000)
    assert one.throughput_over_slowest() == pytest.approx(2.5)
    assert one.learning_speed_up() == pytest.approx(2 * 10 / 11)
    first, second = one.nodes
    assert (first.deltas, first.dropped, first.steps) == (29, 0, 232)
    assert first.age_steps == pytest.approx(2.0)
    assert 0 < first.staleness < 2 and 0 < first.late < 0.1
    assert second.bytes_sent == 29_000 and math.isnan(second.refused) is False


def test_a_node_is_here_between_its_events(tmp_path: Path) -> None:
    more = [event(10.0, "pc1", "lost"), event(14.0, "pc1", "joined"), event(20.0, "pc2", "left")]
    one = summary(tmp_path, [*broker(["pc1", "pc2"], seconds=30), *more])
    here = [
        (bar.node, round(bar.begin + one.began, 1), round(bar.end + one.began, 1), bar.how) for bar in one.presences
    ]
    assert here == [("pc1", 0.5, 10.0, "lost"), ("pc1", 14.0, 30.0, ""), ("pc2", 0.5, 20.0, "left")]


def test_a_fault_costs_what_the_node_would_have_trained_on(tmp_path: Path) -> None:
    more = [
        event(10.0, "pc1", "lost"),
        event(14.0, "pc1", "joined"),
        event(20.0, "pc2", "lost"),
        event(21.0, "pc1", "quarantined"),
    ]
    one = summary(tmp_path, [*broker(["pc1", "pc2"], seconds=30), *more])
    first, second, third = one.faults
    pace = 8.0 * BATCH
    assert (first.away, first.samples) == (pytest.approx(4.0), pytest.approx(4 * pace))
    assert second.away == math.inf and second.samples == pytest.approx(10 * 1.5 * pace)
    assert third.what == "quarantined" and math.isnan(third.away) and math.isnan(third.samples)


def test_deltas_without_weight_are_one_fault_of_their_node(tmp_path: Path) -> None:
    records = broker(["pc1", "pc2"], seconds=10)
    for one in records:
        if one["kind"] == "release" and one["version"] > 4:
            one["contributions"][1]["too_stale"] = True
    (fault,) = summary(tmp_path, records).faults
    assert (fault.node, fault.samples) == ("pc2", 5 * BATCH)


def test_without_events_a_node_is_here_while_it_is_heard(tmp_path: Path) -> None:
    records = [one for one in broker(["pc1"], seconds=10) if one["kind"] != "membership"]
    (bar,) = summary(tmp_path, records).presences
    assert bar.end - bar.begin == pytest.approx(8.1)


def test_runs_are_compared_at_the_loss_that_all_have_reached(tmp_path: Path) -> None:
    slow = Summary(zt.records.load(write_run(tmp_path / "slow", ["pc1"], run="a")), "slow")
    fast = Summary(zt.records.load(write_run(tmp_path / "fast", ["pc1", "pc2"], run="b", speed=3.0)), "fast")
    loss = common_loss([slow, fast])
    assert loss == slow.loss > fast.loss
    assert 2.2 < slow.reached(loss)[0] / fast.reached(loss)[0] < 3.8
    assert math.isnan(common_loss([])) and math.isnan(Summary(zt.records.Run(), "empty").loss)


def test_bytes_at_a_time_are_those_of_both_ways(tmp_path: Path) -> None:
    one = summary(tmp_path, broker(["pc1", "pc2"], seconds=30))
    at, total = one.traffic()
    assert total[-1] == 2 * 4000 * 29 and (total[1:] >= total[:-1]).all()
    assert one.bytes_at(at[3:4])[0] == total[3]


def test_versions_of_packages_are_those_of_each_process(tmp_path: Path) -> None:
    run = zt.records.load(write_run(tmp_path / "run", ["pc1"], seconds=5))
    assert {name: versions["jax"] for name, versions in software(run).items()} == {
        "the broker": "0.7.0",
        "pc1": "0.7.1",
    }


def test_what_happened_before_training_began_costs_nothing(tmp_path: Path) -> None:
    early = [event(0.6, "pc1", "lost"), event(0.9, "pc1", "joined")]
    (fault,) = summary(tmp_path, [*broker(["pc1", "pc2"], seconds=10), *early]).faults
    assert fault.seconds < 0 and fault.samples == 0
