"""The status of a run for other programs: as JSON, and as an exit code."""

from __future__ import annotations

import json
import math

import pytest

from zmqtrain.cli import main
from zmqtrain.cli.operate import faults, roster_as_json
from zmqtrain.protocol.messages import Roster, replace_fields


def test_what_is_not_known_is_null_in_json() -> None:
    members = ({"name": "pc-1", "loss": math.nan, "step": 3},)
    roster = Roster(1, members, "pc-1#1", 10, 2, 0, 0, 1.5, {"loss": math.inf}, 0)
    entry = json.loads(roster_as_json(roster))
    assert entry["members"] == [{"name": "pc-1", "loss": None, "step": 3}]
    assert entry["scores"] == {"loss": None}
    assert (entry["version"], entry["seconds"]) == (1, 1.5)


def roster(**more: object) -> Roster:
    members = ({"name": "pc-1", "state": "live"}, {"name": "pc-2", "state": "quarantined"})
    return replace_fields(Roster(1, members, "", 10, 2, 0, 0, 1.5, {}, 0), **more)


@pytest.mark.parametrize(
    ("one", "name", "wrong"),
    [
        (roster(), "", 0),
        (roster(), "pc-1", 0),
        (roster(), "pc-2", 1),
        (roster(), "pc-3", 1),
        (roster(units_total=8, units_done=7), "", 0),
        (roster(units_total=8, units_done=8), "", 1),
        (roster(hub={"ending": True}), "", 1),
        (roster(hub={"waits_for_room": True, "ending": True}), "pc-3", 3),
        (roster(hub={"unsaved": True}), "", 1),
        (roster(shards=("tcp://a:1", "tcp://b:1")), "", 0),
        (roster(shards=("tcp://a:1", "")), "", 1),
    ],
)
def test_a_check_names_each_thing_that_is_wrong(one: Roster, name: str, wrong: int) -> None:
    assert len(faults(one, name)) == wrong


@pytest.mark.parametrize("flags", [["--check", "--json"], ["--check", "--watch"], ["--node", "pc-1"]])
def test_flags_that_do_not_go_together_are_refused(flags: list[str]) -> None:
    assert main(["status", "tcp://127.0.0.1:1", *flags]) == 2
