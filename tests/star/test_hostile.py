"""Attackers and an honest node at one broker, on the star, for a moment; and what is said of figures."""

from __future__ import annotations

from hostile import HELD_BYTES, Case, judge, measure

FINE = {"ratio_steps": 1.0, "ratio_aggregates": 0.97, "rss_mb": 100.0, "rss_most_mb": 120.0, "troubles": []}


def test_a_node_trains_on_while_a_broker_is_attacked():
    row = measure(Case(minutes=0.2, nodes=1, params=1000, step_seconds=0.02, block_seconds=6.0, lost_seconds=60.0))
    assert row["troubles"] == [] and row["hostile_aggregates_s"] > 0
    assert row["descriptors_most"] > row["descriptors"], "nobody has attacked"


def test_what_is_not_as_it_should_be_is_named():
    assert judge(FINE) == []
    worse = FINE | {"ratio_aggregates": 0.5, "rss_most_mb": 101.0 + HELD_BYTES / 1e6, "troubles": ["node 0: lost"]}
    assert judge(worse) == [
        "ratio_aggregates is 0.500",
        "the broker held 369 MB, and 100 before the first attack",
        "node 0: lost",
    ]
