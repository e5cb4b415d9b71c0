"""What a browser is sent: JSON that is text only, the same for all, bounded, and all of it again with another run."""

from __future__ import annotations

import json
from typing import Any

from zmqtrain.page.picture import ALL_POINTS, MOST_EVENTS, MOST_ROUTINE, MOST_ROWS, ROUTINE, Picture, Row, Tile

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202egnp\u2066" + "x" * 1_000_000


def taken(picture: Picture) -> dict[str, Any]:
    return json.loads(picture.take_change())


def test_a_tick_has_what_is_new_and_the_whole_has_all() -> None:
    picture = Picture()
    curve = picture.curve("node", "0", "pc1")
    assert curve is not None
    curve.line.add(1.0, 5.0)
    picture.add_event(1.0, "joined", "pc1", "at version 0", "0")
    first = taken(picture)
    assert first["lines"]["node 0 0"]["times"] == [1.0] and len(first["events"]) == 1
    second = taken(picture)
    assert second["lines"]["node 0 0"] == {"shift": 0.0} and second["events"] == []
    whole = json.loads(picture.whole())
    assert whole["whole"] and whole["lines"]["node 0 0"]["values"] == [5.0] and len(whole["events"]) == 1


def test_another_run_is_sent_whole() -> None:
    picture = Picture()
    picture.add_event(1.0, "joined", "pc1", "")
    taken(picture)
    picture.clear()
    picture.add_event(0.5, "joined", "pc9", "")
    again = taken(picture)
    assert again["whole"] and [event["node"] for event in again["events"]] == ["pc9"]
    assert "whole" not in taken(picture)


def test_texts_of_others_are_bounded_and_printable() -> None:
    picture = Picture()
    picture.rows["0"] = Row("0", HOSTILE, "live", HOSTILE, [HOSTILE], [HOSTILE])
    picture.curve("node", "0", HOSTILE)
    picture.add_event(1.0, HOSTILE, HOSTILE, HOSTILE)
    picture.tiles, picture.sentences, picture.hub = [Tile(HOSTILE, HOSTILE)], [HOSTILE], [(HOSTILE, HOSTILE)]
    picture.heading.note = HOSTILE
    sent = picture.take_change()
    assert len(sent) < 20_000
    assert sent.isascii() and b"\n" not in sent
    text = json.dumps(json.loads(sent), ensure_ascii=False)
    assert "<script>" in text  # as text it is harmless, and it is shown as it came
    assert text.isprintable()


def test_what_is_kept_is_bounded() -> None:
    picture = Picture()
    for number in range(MOST_EVENTS + 50):
        picture.add_event(float(number), "lost", f"pc{number}", "")
    for number in range(MOST_ROWS + 50):
        picture.rows[str(number)] = Row(str(number), f"pc{number}", "lost" if number % 2 else "live")
    picture.make_room()
    assert len(picture.rows) == MOST_ROWS
    assert sum(row.state == "live" for row in picture.rows.values()) == (MOST_ROWS + 50) // 2
    assert "1" not in picture.rows
    whole = json.loads(picture.whole())
    assert len(whole["events"]) == MOST_EVENTS


def test_many_lines_share_the_points() -> None:
    picture = Picture()
    for node in range(64):
        curve = picture.curve("node", str(node), f"pc{node}")
        assert curve is not None
        for second in range(2000):
            curve.line.add(float(second), 1.0)
    points = sum(len(line["times"]) for line in json.loads(picture.whole())["lines"].values())
    assert points <= ALL_POINTS + 64 * 2


def test_events_of_each_second_push_no_others_out_and_are_thinned_but_at_their_ends() -> None:
    picture = Picture()
    picture.add_event(0.0, "joined", "pc1", "at version 0")
    for second in range(1, 5001):
        picture.add_event(float(second), ROUTINE[second % 2], "", f"version {second}")
    picture.add_event(5001.0, "lost", "pc1", "its connection is gone")
    events = json.loads(picture.whole())["events"]
    assert (events[0]["what"], events[-1]["what"]) == ("joined", "lost")
    assert (events[1]["seconds"], events[-2]["seconds"]) == (1.0, 5000.0)
    assert len(events) <= MOST_ROUTINE + 2
    assert [event["number"] for event in events] == sorted(event["number"] for event in events)


def test_a_curve_that_is_removed_is_gone_for_all_browsers() -> None:
    picture = Picture()
    curve = picture.curve("node", "0", "pc1", -1)
    assert curve is not None
    curve.line.add(1.0, 2.0)
    assert "node 0 -1" in json.loads(picture.take_change())["lines"]
    picture.remove_curve("node", "0", -1)
    picture.remove_curve("node", "0", 7)
    change = json.loads(picture.take_change())
    assert change["whole"] and change["lines"] == {}
    assert "whole" not in json.loads(picture.take_change())
