"""The fuzzer: its inputs, its targets for a moment each, and what it makes of a bug."""

from __future__ import annotations

from random import Random

import pytest

from zmqtrain.codecs import fast

from fuzz import Counted, fuzz_plainly, minimise, read_count
from fuzz_inputs import mutate_session, pack_session, read_session
from fuzz_targets import TARGETS

A_MOMENT = {"framing": 12_000, "broker": 3_000, "payload": 3_000, "collectives": 8_000, "peer": 6_000, "files": 150}


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    fast.use(None)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_nothing_that_is_fuzzed_for_a_moment_fails_but_as_it_should(name):
    counted = Counted(name, A_MOMENT[name], 0.0)
    fuzz_plainly(counted, seed=1)
    assert counted.crash is None, counted.crash[1]
    assert counted.row()["frames"] >= A_MOMENT[name]


def test_any_bytes_are_a_session_and_a_session_is_its_bytes():
    records = [(0, (b"head", b"")), (7, ()), (255, (b"x" * 300,))]
    assert read_session(pack_session(9, records)) == (9, records)
    random = Random(0)
    for _ in range(300):
        seed, some = read_session(random.randbytes(random.randrange(60)))
        assert read_session(pack_session(seed, some)) == (seed, some)


def test_mutations_follow_from_their_seed_and_keep_most_of_a_session():
    honest = TARGETS["broker"].corpus()
    first, again = ([mutate_session(honest[0], Random(n), honest) for n in range(50)] for _ in range(2))
    assert first == again and len(set(first)) > 45
    before = {frames for _, frames in read_session(honest[0])[1]}
    kept = [sum(frames in before for _, frames in read_session(one)[1]) / len(before) for one in first]
    assert sorted(kept)[25] > 0.7


def test_a_bug_is_cut_down_to_the_records_that_it_needs(monkeypatch):
    def run(data):
        _, records = read_session(data)
        said = [frames[0] for _, frames in records if frames]
        if b"a" in said and b"b" in said:
            raise ValueError("a bug")
        return len(records)

    target = TARGETS["peer"]._replace(
        run=run, corpus=lambda: [pack_session(0, [(0, (bytes([n]),)) for n in range(120)])]
    )
    monkeypatch.setitem(TARGETS, "peer", target)
    counted = Counted("peer", 1000, 0.0)
    fuzz_plainly(counted, seed=0)
    data, text = counted.crash
    assert "ValueError: a bug" in text and counted.enough

    def fails(one):
        try:
            run(one)
        except ValueError as error:
            return str(error)
        return ""

    assert read_session(minimise(data, fails))[1] == [(0, (b"a",)), (0, (b"b",))]


def test_counts_are_read_as_people_write_them():
    assert [read_count(text) for text in ("500", "100k", "10M", "1.5m")] == [500, 100_000, 10_000_000, 1_500_000]
