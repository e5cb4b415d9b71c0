"""What a node's codec thread does: what is on its way is published as it was, and who diverges begins again or ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.fixed import fixed_run
from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.core.errors import CodecError, NonFiniteDelta, ZmqTrainError
from zmqtrain.core.types import LeafSpec, Offer
from zmqtrain.node.codec import Inbox, NodeCodec, codec_failure
from zmqtrain.node.offers import Offers, Restarts

MODEL = (LeafSpec("w", (10,), "float32"),)


class World:
    """The jobs of one node, and what they publish."""

    def __init__(self, **settings):
        self.name, self.settings = "pc-1", fixed_run(**settings)
        self.published, self.inbox, self.restarts = [], Inbox(), Restarts()
        self.jobs = NodeCodec(self, Offers(), self.inbox, self.restarts)
        self.jobs.coder = DeltaCoder(MODEL, self.settings)

    def publish(self, offer, base, encoded, score):
        self.published.append((offer.sequence, base, encoded, score))

    def on_decoded(self, spoiled):
        assert spoiled is None

    def offer(self, sequence, value=0.5, scores=()):
        self.jobs.encode(Offer(sequence, 0, [np.full(10, value, np.float32)], 8, 1, scores), 3)


def test_an_offer_is_published_with_its_base_and_the_mean_of_its_scores():
    world = World()
    world.offer(0, scores=(1.0, 2.0))
    ((sequence, base, encoded, score),) = world.published
    assert (sequence, base, score) == (0, 3, 1.5) and encoded is world.jobs.coder.unacked[0]


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_who_diverges_begins_again_but_in_strict_mode_ends(mode):
    world = World(mode=mode, release="all")
    if mode == "strict":
        with pytest.raises(NonFiniteDelta, match=r"pc-1: the delta of w holds 10 values .* training has diverged here"):
            world.offer(0, math.nan)
    else:
        world.offer(0, math.nan)
        assert world.restarts.begun and world.inbox.peek().reset and list(world.inbox.take_withdrawn()) == [0]
    assert world.published == []


def test_what_is_on_its_way_is_kept_and_published_again_to_the_same_bits():
    world, facts = World(codec="int4"), {"node": {"resets": 0}, "offers": {"on_their_way": [[0, 0], [1, 0]]}}
    world.jobs.keeps_sent = True
    for sequence in range(2):
        world.offer(sequence, 0.5 + sequence)
    kept, arrays = world.jobs.kept(facts)
    again = World(codec="int4")
    again.jobs.send_again(kept, arrays)
    assert [one[:2] for one in again.published] == [(0, 3), (1, 3)]
    for (_, _, mine, _), (_, _, theirs, _) in zip(again.published, world.published, strict=True):
        assert [bytes(frame) for frame in mine.frames] == [bytes(frame) for frame in theirs.frames]


def test_what_has_landed_or_was_withdrawn_is_kept_no_more():
    world = World()
    world.jobs.keeps_sent = True
    for sequence in range(2):
        world.offer(sequence)
    world.jobs.withdraw(world.jobs.coder, 0, "lost")
    kept, _ = world.jobs.kept({"node": {"resets": 0}, "offers": {"on_their_way": [[0, 0], [1, 0]]}})
    assert [sent[0] for sent in kept["sent"]] == [1]


def test_a_failure_says_what_to_do_where_that_is_known(caplog):
    unreadable = codec_failure("pc-1", CodecError("3 bytes too many"))
    assert "pc-1 cannot read what the broker sent: 3 bytes too many. Start this node again" in str(unreadable)
    for error in (NonFiniteDelta("nan"), ZmqTrainError("another")):
        assert codec_failure("pc-1", error) is error
    assert NodeCodec.__module__ not in [record.name for record in caplog.records]
    assert "the codec thread of pc-1 failed: KeyError" in str(codec_failure("pc-1", KeyError("x")))
    assert "the codec thread of pc-1 failed" in caplog.text
