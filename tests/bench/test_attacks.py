"""What attackers say is what it is meant to be, and the rows of single attacks are judged by their pace."""

from __future__ import annotations

from itertools import islice
from random import Random

from zmqtrain.protocol.framing import MAX_HEAD_BYTES, open_head
from zmqtrain.protocol.messages import MESSAGES

from attacks import ATTACKS, largest_heads
from hostile import judge_rows

ROW = {"attack": "join_and_be_silent", "ratio_during": 0.97, "ratio_after": 1.01}


def test_the_largest_heads_are_of_every_kind_and_as_large_as_any_that_is_opened():
    heads = [(open_head(head).kind, len(head)) for head in largest_heads(Random(1), size=20_000)]
    assert {kind for kind, _ in heads} == {*MESSAGES}
    assert all(15_000 < size < 45_000 for _, size in heads)
    assert all(len(head) <= MAX_HEAD_BYTES for head in islice(largest_heads(Random(2)), 40))


def test_each_attack_has_a_row_which_is_judged_during_it_and_after_it():
    assert judge_rows([ROW]) == [] and {ROW["attack"], "send_largest_heads", "fetch_again_and_again"} <= {*ATTACKS}
    assert judge_rows([ROW | {"ratio_during": 0.03}]) == ["join_and_be_silent: 0.030 of the pace of before during it"]
    assert judge_rows([ROW | {"ratio_after": float("nan")}]) == [
        "join_and_be_silent: nan of the pace of before after it"
    ]
