"""What the hub notices of how nodes train: the same batches, no data units, an evaluation far worse than the best."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import hub_of, live_hub, sent
from zmqtrain.core.errors import CheckpointError, RemoteProtocolError
from zmqtrain.protocol.messages import Hello, Report, Welcome, replace_fields

REPORT = Report(40, 320, 99.0, 0.25, 4.0, 1, 10, 20)


def rows(hub):
    return {str(one["name"]): one for one in hub.roster(1.0).members}


def report(hub, peer, **told):
    hub.receive(peer, replace_fields(REPORT, **told), 0.0)


def test_two_nodes_of_the_same_first_step_are_named_in_both_rows():
    hub = live_hub("a", "b", "c")
    report(hub, "a", first_step="0a")
    report(hub, "c", first_step="0c")
    report(hub, "b")
    assert not any("same_batches_as" in row for row in rows(hub).values())
    report(hub, "b", first_step="0a")
    found = rows(hub)
    assert found["a"]["same_batches_as"] == "b#2" and found["b"]["same_batches_as"] == "a#1"
    assert "same_batches_as" not in found["c"]
    hub.gone("a", "it was switched off", 1.0)
    assert "same_batches_as" not in rows(hub)["b"]


def test_one_unit_that_was_dealt_twice_is_no_reason_and_two_units_of_the_same_batches_are():
    hub = live_hub("a", "b", "c")
    report(hub, "a", first_step="0a", first_unit=3)
    report(hub, "b", first_step="0a", first_unit=3)
    assert not any("same_batches_as" in row for row in rows(hub).values())
    report(hub, "c", first_step="0a", first_unit=4)
    assert "same_batches_as" in rows(hub)["c"]


@pytest.mark.parametrize(
    ("units", "told", "takes_none"),
    [(100, {}, True), (100, {"first_unit": 0}, False), (100, {"step": 0}, False), (0, {}, False)],
)
def test_a_node_that_takes_no_units_of_a_run_that_counts_them_is_named(units, told, takes_none):
    hub = live_hub("a", units=units)
    report(hub, "a", **told)
    assert rows(hub)["a"].get("takes_no_units", False) is takes_none


def test_an_evaluation_ten_times_worse_than_the_best_is_in_the_roster_until_one_is_not():
    hub = live_hub("a")
    hub.version = 9
    for version, loss in ((1, 4.0), (2, 2.0), (3, 19.9)):
        report(hub, "a", scores={"loss": loss}, score_version=version)
        assert "best_loss" not in hub.roster(1.0).hub
    report(hub, "a", scores={"loss": 489.0}, score_version=4)
    assert {"best_version": 2, "best_loss": 2.0}.items() <= hub.roster(1.0).hub.items()
    report(hub, "a", scores={"loss": 2.5}, score_version=5)
    assert "best_loss" not in hub.roster(1.0).hub and hub.best == (2, 2.0)


@pytest.mark.parametrize("losses", [(-4.0, 489.0), (0.0, 489.0), (2.0, float("nan")), (float("nan"), 489.0)])
def test_losses_that_no_factor_compares_are_left_alone(losses):
    hub = live_hub("a")
    hub.version = 9
    for version, loss in enumerate(losses):
        report(hub, "a", scores={"loss": loss}, score_version=version)
    assert hub.worse is None


def test_the_best_evaluation_outlives_a_restart():
    hub = live_hub("a")
    hub.version = 9
    report(hub, "a", scores={"loss": 2.0}, score_version=4)
    again = hub_of()
    again.restore(hub.state())
    assert again.best == (4, 2.0)
    again.restore({name: part for name, part in hub.state().items() if name != "best"})
    assert again.best is None
    with pytest.raises(CheckpointError):
        again.restore(hub.state() | {"best": ["x"]})


@pytest.mark.parametrize("told", [{"device": "x" * 65}, {"device": "a\x1b[2J"}, {"first_step": "x" * 65}])
def test_a_report_with_a_device_or_a_digest_that_no_node_says_is_refused(told):
    hub = live_hub("a")
    with pytest.raises(RemoteProtocolError, match="a Report of that length"):
        report(hub, "a", **told)


def test_the_device_is_in_the_roster():
    hub = live_hub("a", "b")
    report(hub, "a", device="NVIDIA GeForce RTX 3060")
    assert rows(hub)["a"]["device"] == "NVIDIA GeForce RTX 3060" and "device" not in rows(hub)["b"]


def test_a_newcomer_is_told_how_many_samples_are_in_the_run():
    hub = live_hub("a")
    hub.samples = 4096
    ((_, welcome),) = sent(hub.receive("b", Hello("b"), 0.0), Welcome)
    assert welcome.samples == 4096


def test_versions_of_packages_and_data_are_named_where_they_differ_from_those_of_most_nodes():
    hub = live_hub("a", "b", "c")
    for peer, versions in (("a", "zmqtrain 2"), ("b", "zmqtrain 2"), ("c", "zmqtrain 1")):
        report(hub, peer, software=versions, data="0a/11")
    found = rows(hub)
    assert hub.roster(1.0).hub["software"] == "zmqtrain 2"
    assert [found[name].get("software") for name in "abc"] == [None, None, "zmqtrain 1"]
    assert not any("other_data" in row for row in found.values())
    report(hub, "b", data="0b/11")
    found = rows(hub)
    assert found["b"]["other_data"] is True and "software" not in found["b"]
    build = "zmqtrain 0.2.0.post913+ge16f2fb25.d20261127, Python 3.11.7, jax 0.10.2"
    report(hub, "a", software=build)
    assert rows(hub)["a"]["software"] == build
    with pytest.raises(RemoteProtocolError, match="a Report of that length"):
        report(hub, "a", software="x" * 201)
    with pytest.raises(RemoteProtocolError, match="a Report of that length"):
        report(hub, "a", software="\x1b[31m")


def test_a_row_says_how_long_its_node_was_silent_and_how_many_offers_it_has_put_off():
    hub = live_hub("a")
    report(hub, "a", offers_refused=5)
    (row,) = hub.roster(2.0).members
    assert (row["silent"], row["put_off"]) == (2.0, 5)
