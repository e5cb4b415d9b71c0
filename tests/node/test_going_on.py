"""What a node that goes on from its checkpoint takes over of it, and what its hub says instead."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.clocks import VirtualClock
from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.settings import FIRST, RunSettings
from zmqtrain.core.types import LeafSpec, spec_to_plain
from zmqtrain.node.checkpoint import FORMAT, CheckpointOptions, NodeCheckpoint, SavedNode, read_saved
from zmqtrain.protocol.messages import Welcome, model_to_wire
from zmqtrain.protocol.peer import Peer

AUTO = RunSettings(release="immediately")
MODEL = (LeafSpec("w", (3,), "float32"),)
FIRST_SPECS = (FIRST["codec"], FIRST["broadcast_codec"], FIRST["outer"])
LATER = ("int8:block=256", "int8:block=256", FIRST["outer"])
KNOWN = [[-1, 2, 2, *FIRST_SPECS], [4, 8, 2, *LATER]]


def saved(schedules):
    node = {"peer": "a#1", "run": "run-1", "version": 9, "incarnation": 5, "term": 0, "resets": 0}
    node |= {"settings": AUTO.to_dict(), "model": spec_to_plain(MODEL), "schedules": schedules}
    return {"format": FORMAT, "node": node, "offers": {"sequence": 3}, "units": {}, "coder": {"unacked": []}}


def going_on(tmp_path):
    """A node that goes on from version 9, at which the second of the schedules that it knows holds."""
    peer = Peer("a#1", "a", incarnation=7)
    offers = SimpleNamespace(version=9, restore=lambda plain: None, in_flight=tuple, withdrawn=set)
    units = SimpleNamespace(restore=lambda plain, exactly: None)
    codec = SimpleNamespace(keeps_sent=False, kept=lambda facts: None)
    node = SimpleNamespace(clock=VirtualClock(), peer=peer, offers=offers, units=units, codec=codec)
    checkpoint = NodeCheckpoint(CheckpointOptions(CheckpointFolder(tmp_path, 3), "", SavedNode(saved(KNOWN), {})), node)
    peer.start(0.0)
    return peer, checkpoint


def test_without_its_hub_a_node_goes_on_by_the_schedules_of_its_checkpoint(tmp_path):
    peer, checkpoint = going_on(tmp_path)
    checkpoint.go_on()
    assert [peer.timetable.at(version).codec for version in (3, 4, 9)] == [FIRST["codec"], LATER[0], LATER[0]]


@pytest.mark.parametrize("welcomed_first", [True, False])
def test_a_hub_that_has_lost_a_schedule_says_by_which_one_a_node_goes_on_from_its_checkpoint(tmp_path, welcomed_first):
    peer, checkpoint = going_on(tmp_path)
    hub = Welcome("run-1", 9, AUTO.to_dict(), model_to_wire(MODEL), schedules=((-1, 2, 2, *FIRST_SPECS),))
    if welcomed_first:
        peer.receive(hub, 0.0)
        checkpoint.go_on()
    else:
        checkpoint.go_on()
        peer.receive(hub, 0.0)
    assert peer.timetable.at(9).codec == FIRST["codec"], "the hub would refuse each of its deltas, for ever"


@pytest.mark.parametrize("schedules", [7, [[1]], [[4, 0, 2, *LATER]]])
def test_schedules_that_cannot_be_are_a_checkpoint_that_cannot_be_read(tmp_path, schedules):
    folder = CheckpointFolder(tmp_path, 3)
    folder.save(9, saved(schedules), {"params/w": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_saved(folder)
