"""What the hub holds is bounded, whatever its peers say and however many they are."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import SAMPLES, attend, contribute, live_hub, publish, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol import hub as hub_machine
from zmqtrain.protocol.effects import Disconnect, Expect, SendTo
from zmqtrain.protocol.framing import MAX_HEAD_BYTES, encode_message
from zmqtrain.protocol.hub import MOST_MEMBERS, Hub
from zmqtrain.protocol.members import MOST_WAITING
from zmqtrain.protocol.messages import Goodbye, Hello, Refused, Report, replace_fields
from zmqtrain.protocol.rounds import release_rule_from_spec


def test_records_of_peers_that_are_long_gone_are_bounded():
    hub = live_hub("a")
    for number in range(1100):
        hub.replay(number + 1, ((f"peer-{number}", 0),), 0)
    assert len(hub.state()["records"]) == 1024


def test_a_report_that_would_swell_the_roster_costs_its_sender():
    hub = live_hub("a", "b")
    for words in ({"waiting": "x" * 1000}, {"scores": {f"score-{i}": 1.0 for i in range(1000)}}):
        with pytest.raises(RemoteProtocolError, match="Report of that length"):
            hub.receive("a", replace_fields(SAMPLES[Report], **words), 0.0)


@pytest.mark.parametrize("release", ["all", "time:seconds=1000"])
def test_who_floods_a_round_that_stays_open_is_refused_and_is_not_held_without_end(release):
    hub = live_hub("a", "b", release=release)
    for sequence in range(MOST_WAITING):
        contribute(hub, "a", sequence)
    ((_, answer),) = sent(hub.receive("a", publish(MOST_WAITING), 0.0), Refused)
    assert (answer.reason, answer.sequence) == ("waiting", MOST_WAITING)
    assert len(hub.rounds.pending) == MOST_WAITING
    contribute(hub, "b", 0)


def test_a_hub_that_is_full_asks_to_try_again_and_its_roster_is_still_one_head():
    hub = Hub(RunSettings(lost_seconds=3.0), release_rule_from_spec("quorum"), "run-1")
    report = Report(1, 8, 1.0, 0.5, 4.0, 0, 0, 0, waiting="\U0001f600" * 200)
    for number in range(MOST_MEMBERS):
        peer = f"{number:03}" + "p" * 197
        hub.receive(peer, Hello("\U0001f600" * 100, link=1.0), 0.0)
        hub.receive(peer, report, 0.0)
    assert len(encode_message(hub.roster(0.0))) < MAX_HEAD_BYTES
    refused = hub.receive("late", Hello("late"), 0.0)[0].message
    assert refused.reason == "unknown" and "try again" in refused.text
    assert any(isinstance(effect, SendTo) for effect in hub.receive(peer, Hello("again"), 0.0))
    attend(hub, 10.0)
    assert hub.receive("late", Hello("late"), 10.0) and "late" in hub.members


def test_what_a_peer_calls_itself_stays_on_one_line():
    hub = Hub(RunSettings(), release_rule_from_spec("quorum"), "run-1")
    hub.receive("a", Hello("a\n2026 ERROR \x1b[2J"), 0.0)
    assert hub.members["a"].name == "a?2026 ERROR ?[2J"
    (effect,) = [one for one in hub.receive("a", Goodbye("x\ny" * 1000), 0.0) if isinstance(one, Disconnect)]
    assert "\n" not in effect.text and len(effect.text) < 300


def test_a_node_has_no_more_bytes_waiting_than_its_model_and_the_settings_ask_for(monkeypatch):
    monkeypatch.setattr(hub_machine, "MOST_WAITING_BYTES", 1000)
    hub = live_hub("a", "b", release="all")
    for sequence in range(10):
        contribute(hub, "a", sequence, sizes=(100,))
    refused = hub.receive("a", publish(10, sizes=(1,)), 0.0)[0].message
    assert refused.reason == "waiting" and "such large ones" in refused.text
    assert hub.receive("b", publish(0), 0.0) == [Expect("b", publish(0))]
