"""When a node that has no hub says so again."""

from __future__ import annotations

from tests.fixed import fixed_run
from zmqtrain.protocol.messages import Welcome
from zmqtrain.protocol.peer import Peer
from zmqtrain.session.alone import AGAIN_SECONDS, Alone


def test_a_node_that_goes_on_from_a_checkpoint_without_a_hub_says_so_once_a_minute_until_one_welcomes_it():
    peer, alone = Peer("a#1", "a"), Alone()
    assert alone.look(peer, 0.0) == alone.look(peer, 2 * AGAIN_SECONDS) == 0, "it is of no run yet"
    peer.resume("run-1", 3, fixed_run(), (), ())
    peer.start(200.0)
    said = [alone.look(peer, 200.0 + seconds) for seconds in range(0, 181, 20)]
    assert [seconds for seconds in said if seconds] == [60.0, 120.0, 180.0]
    peer.receive(Welcome("run-1", 3, fixed_run().to_dict()), 381.0)
    assert alone.look(peer, 382.0) == alone.look(peer, 500.0) == 0
