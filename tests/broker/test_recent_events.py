"""The events of the last seconds, as rosters carry them."""

from __future__ import annotations

from zmqtrain.broker.core import MOST_RECENT, RECENT_SECONDS, RecentEvents
from zmqtrain.protocol.messages import MAX_WORDS


def test_an_event_is_in_the_rosters_of_some_seconds_with_a_number_that_grows():
    recent = RecentEvents()
    recent.add(1.0, "joined", "a", "at version 0")
    recent.add(2.0, "lost", "a", "its connection is gone")
    first, second = recent.rows(2.0)
    assert first == {"number": 1, "seconds": 1.0, "what": "joined", "node": "a", "text": "at version 0"}
    assert second["number"] == 2
    assert recent.rows(1.5 + RECENT_SECONDS) == (second,)
    assert recent.rows(99.0) == ()


def test_a_peer_cannot_fill_the_rosters():
    recent = RecentEvents()
    for _ in range(1000):
        recent.add(1.0, "refused", "a", "x" * 10_000 + "\x1b[31m")
    (row,) = recent.rows(1.0)
    assert len(str(row["text"])) <= 200 and str(row["text"]).isprintable()
    for number in range(1000):
        recent.add(1.0, "again", f"a{number}", "")
    assert len(recent.rows(1.0)) == MOST_RECENT


def test_a_text_that_is_cut_says_so():
    recent = RecentEvents()
    recent.add(1.0, "plan", "", "k = 2, " + "x" * 1000)
    (event,) = recent.rows(1.0)
    text = str(event["text"])
    assert text.startswith("k = 2, x") and text.endswith("x…") and len(text) == MAX_WORDS
