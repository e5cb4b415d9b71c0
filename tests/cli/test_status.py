"""A roster as JSON for other programs."""

from __future__ import annotations

import json
import math

from zmqtrain.cli.operate import roster_as_json
from zmqtrain.protocol.messages import Roster


def test_what_is_not_known_is_null_in_json() -> None:
    members = ({"name": "pc-1", "loss": math.nan, "step": 3},)
    roster = Roster(1, members, "pc-1#1", 10, 2, 0, 0, 1.5, {"loss": math.inf}, 0)
    entry = json.loads(roster_as_json(roster))
    assert entry["members"] == [{"name": "pc-1", "loss": None, "step": 3}]
    assert entry["scores"] == {"loss": None}
    assert (entry["version"], entry["seconds"]) == (1, 1.5)
