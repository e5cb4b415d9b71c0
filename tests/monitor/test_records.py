"""What a run leaves behind: lines of JSON that can be read again, with the same bits."""

from __future__ import annotations

import json
from math import inf, nan, pi

import numpy as np
import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.records import (
    crc_of_frames,
    crc_of_leaves,
    name_of,
    read_records,
    record,
    release_facts,
    write_records,
)
from zmqtrain.protocol.effects import Contribution, Reduce

CONTRIBUTION = Contribution("pc-1#ab", 3, 0, 64, 0.1, 6, 1)


def test_what_is_written_is_read_again_with_the_same_bits(tmp_path):
    path = tmp_path / "run.jsonl"
    written = [record("step", pi, node="pc-1", step=3, loss=0.1 + 0.2), record("unit", 1e-9, node="pc-1", unit=1 << 41)]
    write_records(path, written)
    assert read_records(path) == written


def test_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "run.jsonl"
    write_records(path, [record("pace", 0.0, node="pc-1", own=nan, rates=[inf, 2.0])])
    assert read_records(path)[0] == {"kind": "pace", "seconds": 0.0, "node": "pc-1", "own": None, "rates": [None, 2.0]}


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    write_records(path, [record("unit", 0.0, node="pc-1", unit=number) for number in (1, 2)])
    path.write_text(path.read_text()[:-5])
    assert [one["unit"] for one in read_records(path)] == [1]
    path.write_text('{"kind": "un')
    assert read_records(path) == []


@pytest.mark.parametrize(
    "text", ["no JSON\n", "[1]\n", '{"seconds": 1}\n', 'broken {\n{"kind": "unit"}\n', "[" * 10**5 + "\n"]
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.jsonl, line 1"):
        read_records(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_records(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot write"):
        write_records(tmp_path / "no" / "where.jsonl", [])


def test_a_release_tells_its_contributions_in_order_and_its_bytes_if_they_are_given():
    reduce = Reduce(7, (0,), (CONTRIBUTION,), 2, False)
    plain = release_facts(reduce, 2)
    assert plain["contributions"][0]["peer"] == "pc-1#ab" and plain["contributions"][0]["node"] == "pc-1"
    assert plain["contributions"][0]["late"] == 0.0
    told = release_facts(reduce, 2, "float32", ((b"ab", b"c"),))
    assert told == {**plain, "codec": "float32", "crc": crc_of_frames([[b"abc"]])}
    json.dumps(told)


def test_the_crc_of_a_model_is_of_its_leaves_in_order_whatever_their_memory():
    leaf = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert crc_of_leaves([leaf, leaf]) == crc_of_leaves([np.asfortranarray(leaf), leaf.copy()])
    assert crc_of_leaves([leaf]) != crc_of_leaves([leaf.T]) != crc_of_leaves([leaf + 1])


def test_a_peer_is_called_by_its_name():
    assert (name_of("pc-1#ab12"), name_of("pc-1")) == ("pc-1", "pc-1")
