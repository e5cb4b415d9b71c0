"""The page of a running hub: figures, events and rows follow from its rosters, whatever these claim."""

from __future__ import annotations

import json
import math
from typing import Any

from zmqtrain.core.settings import RunSettings
from zmqtrain.page.picture import Picture
from zmqtrain.page.roster_feed import COLUMNS, Rate, RosterFeed
from zmqtrain.protocol.messages import Roster

SETTINGS = RunSettings(program="text", every=4, delay=2)


def member(name: str, number: int = 1, **figures: object) -> dict[str, Any]:
    return {
        "peer": f"{name}#{number}", "name": name, "state": "live", "contributions": 4, "staleness": 1, "refused": 0,
        "step": 10, "samples": 160, "samples_per_second": 100.0, "loss": 2.0, "age_steps": 3.0, "bytes_sent": 1000,
        "bytes_received": 2000, "waiting": "", "silent": 0.25, "put_off": 0,
    } | figures  # fmt: skip


def roster(seconds: float, *members: dict[str, Any], **figures: Any) -> Roster:
    facts = {
        "version": 1, "members": members, "evaluator": "", "samples": 100, "contributions": 3, "units_done": 0,
        "units_total": 0, "seconds": seconds, "scores": {}, "score_version": -1, "every": 4, "delay": 2,
        "hub": {"codec": "ternary", "saved_version": -1, "term": 0},
    }  # fmt: skip
    return Roster(**(facts | figures))


def event(number: int, seconds: float, what: str, node: str, text: str) -> dict[str, Any]:
    return {"number": number, "seconds": seconds, "what": what, "node": node, "text": text}


def shown(*rosters: Roster, run: str = "run-1") -> tuple[Picture, RosterFeed]:
    picture = Picture()
    feed = RosterFeed(picture)
    for one in rosters:
        feed.take(one, run, SETTINGS)
    return picture, feed


def events_of(picture: Picture) -> list[tuple[str, str]]:
    return [(one["what"], one["node"]) for one in json.loads(picture.whole())["events"]]


def cell(picture: Picture, row: int, title: str) -> str:
    return list(picture.rows.values())[row].cells[[name for name, _ in COLUMNS].index(title)]


def test_rates_and_shares_follow_from_two_rosters() -> None:
    before = member("pc1", link_rate=1e6), member("pc2", samples=480)
    after = member("pc1", link_rate=1e6, step=30, bytes_sent=501_000), member("pc2", samples=480)
    picture, _ = shown(roster(10.0, *before), roster(12.0, *after))
    assert cell(picture, 0, "steps/s") == "10.0"
    assert cell(picture, 0, "up") == "2.0 Mb/s · 25 %"
    assert (cell(picture, 0, "of samples"), cell(picture, 1, "of samples")) == ("25 %", "75 %")


def test_the_speed_up_is_over_the_fastest_node_and_over_the_slowest() -> None:
    picture, _ = shown(roster(1.0, member("pc1"), member("pc2", samples_per_second=50.0)))
    (tile,) = [tile for tile in picture.tiles if tile.name == "speed-up"]
    assert (tile.figure, tile.below) == ("1.50×", "over one · 3.00× slowest")


def test_a_lost_node_stays_as_a_grey_row_with_its_reason() -> None:
    picture, _ = shown(
        roster(1.0, member("pc1"), member("pc2", 2)),
        roster(2.0, member("pc1"), events=(event(7, 1.5, "lost", "pc2", "its connection is gone"),)),
        roster(3.0, member("pc1"), events=(event(7, 1.5, "lost", "pc2", "its connection is gone"),)),
    )
    row = list(picture.rows.values())[1]
    assert (row.name, row.state) == ("pc2", "lost")
    assert "its connection is gone" in row.text
    assert (cell(picture, 1, "steps/s"), cell(picture, 1, "loss")) == ("–", "2.000")
    assert events_of(picture) == [("lost", "pc2")]


def test_a_node_that_comes_back_has_its_row_again() -> None:
    gone = roster(2.0, events=(event(1, 1.5, "left", "pc1", "goodbye"),))
    picture, _ = shown(roster(1.0, member("pc1")), gone, roster(3.0, member("pc1", 2)))
    assert [(row.name, row.state) for row in picture.rows.values()] == [("pc1", "live")]


def test_two_nodes_of_one_name_have_two_rows() -> None:
    picture, _ = shown(roster(1.0, member("pc1", 1), member("pc1", 2)), roster(2.0, member("pc1", 1), member("pc1", 2)))
    assert len(picture.rows) == 2


def test_a_broker_that_restarts_keeps_the_rows_and_the_axis() -> None:
    picture, feed = shown(roster(100.0, member("pc1", 5)))
    feed.hub_gone("nobody answers")
    assert picture.heading.state == "lost" and "nobody answers" in picture.heading.note
    feed.take(roster(90.0), "run-1", SETTINGS)
    assert picture.heading.state == "live" and picture.heading.note == ""
    assert [row.state for row in picture.rows.values()] == ["waiting"]
    feed.take(roster(91.0, member("pc1", 1)), "run-1", SETTINGS)
    assert [row.state for row in picture.rows.values()] == ["live"]
    assert [what for what, _ in events_of(picture)] == ["broker lost", "broker found"]
    times = json.loads(picture.whole())["lines"]["samples  0"]["times"]
    assert times == sorted(times) and times[-1] > 100


def test_a_run_that_is_over_is_not_a_broker_that_is_lost() -> None:
    picture, feed = shown(roster(100.0, member("pc1")))
    feed.hub_gone("the broker said goodbye: the run is over")
    assert picture.heading.state == "ended" and events_of(picture) == [("run ended", "")]


def test_another_run_at_the_address_begins_a_new_page() -> None:
    picture, feed = shown(roster(50.0, member("pc1")))
    feed.take(roster(1.0, member("pc2")), "run-2", SETTINGS)
    assert [row.name for row in picture.rows.values()] == ["pc2"]
    assert picture.heading.run == "run-2"


def test_versions_checkpoints_standby_and_term_are_events() -> None:
    hub = {"codec": "ternary", "saved_version": 4, "standby": "tcp://pc9:5555", "term": 1}
    picture, _ = shown(roster(1.0), roster(2.0, version=4, contributions=12, hub=hub))
    assert [what for what, _ in events_of(picture)] == ["released", "checkpoint", "standby", "takeover"]


def test_what_differs_is_a_chip() -> None:
    odd = member("pc1", software="zmqtrain 0.1.0", other_data=True, takes_no_units=True, same_batches_as="pc2#2")
    picture, _ = shown(roster(1.0, odd))
    (row,) = picture.rows.values()
    assert len(row.chips) == 4 and any("0.1.0" in chip for chip in row.chips)


def test_a_roster_may_claim_anything() -> None:
    wild = {
        "peer": "a#1", "name": "<b>" * 99 + "\x1b[31m", "state": "live\n", "step": "ten", "loss": math.nan,
        "samples": math.inf, "samples_per_second": -1.0, "bytes_sent": True, "link_rate": -5.0, "staleness": 1e300,
        "silent": math.nan, "refused": "many", "put_off": 1 << 62,
    }  # fmt: skip
    odd_events = ({"what": 3}, event(1, math.nan, "lost", "x", "y"), event(-1, 1e308, "\x07", "\u202e", "z" * 10_000))
    hub = {"saved_version": "all", "term": math.nan, "port_rate": 0.0, "cpu_seconds": "much", "standby": 5}
    picture, feed = shown(roster(1.0, wild, events=odd_events, hub=hub, scores={"loss": math.inf}, every=-3))
    feed.take(roster(math.nan, wild, {}, version=1 << 60, contributions=-5, units_total=-1), "run-1", SETTINGS)
    feed.take(roster(-5.0, wild, scores={"<i>": math.nan}), "run-1", SETTINGS)
    sent = picture.whole()
    assert sent.isascii() and len(sent) < 100_000
    assert json.dumps(json.loads(sent), ensure_ascii=False).isprintable()


def test_a_rate_begins_again_when_its_count_falls() -> None:
    rate = Rate()
    assert math.isnan(rate.take(0.0, 100))
    assert rate.take(2.0, 300) == 100.0
    assert math.isnan(rate.take(3.0, 5))
    assert rate.take(4.0, 15) == 10.0
