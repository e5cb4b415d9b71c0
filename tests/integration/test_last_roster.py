"""The last roster of a run says what those before it said of the hub."""

from __future__ import annotations

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.core.settings import RunSettings


def test_the_roster_of_how_a_run_ended_says_what_the_living_half_of_the_hub_knows():
    seen = []
    with BrokerThread("tcp://127.0.0.1:0", RunSettings(), watch=seen.append):
        pass
    assert {"refused", "turned_away", "waits_for_room", "unsaved"} <= seen[-1].hub.keys()
