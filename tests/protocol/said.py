"""An example or two of everything that is said, for the tests of all who hear it."""

from __future__ import annotations

from tests.fixed import FIXED_RUN
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol.group_messages import Fold, Folded, Forming, Group, GroupLost, JoinGroup, Leave, Relay, Relayed
from zmqtrain.protocol.keys import (
    Awaited,
    Declare,
    Done,
    Enrol,
    Enrolled,
    Founded,
    Initialise,
    Placed,
    Pull,
    Push,
    Values,
)
from zmqtrain.protocol.messages import (
    Aggregate,
    Chunk,
    Credit,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Preempt,
    Probe,
    Probed,
    Publish,
    Quarantine,
    Refused,
    Report,
    Roster,
    Schedule,
    Snapshot,
    Stop,
    Welcome,
    WorkRequest,
    WorkUnit,
)
from zmqtrain.protocol.standby_messages import Books, Holding, Promote, Replica

__all__ = ["EXAMPLES", "ONE_EACH"]

EXAMPLES: list[Message] = [
    Hello("pc-1"),
    Hello("pc-1", link=1.2e8, share=0.8),
    Welcome("run-1", 3, {}, schedules=((-1, 8, 4, "int8", "int8", "sgd:rate=1"), (7, 12, 5, "", "", ""))),
    Welcome(
        "run-1",
        3,
        RunSettings(**FIXED_RUN).to_dict(),
        (("w", (2, 3), "float32"), ("scalar", (), "float32")),
        ((1, 2),),
        (4,),
    ),
    Refused("model", "no"),
    Heartbeat(1.5),
    Goodbye(),
    Report(1, 2, 3.0, 4.0, 5.0, 6, 7, 8, "nothing", {"loss": 1.0}, 9),
    Report(1, 2, 3.0, float("inf"), 5.0, 6, 7, 8),
    Roster(1, ({"name": "pc-1", "step": 3, "loss": 0.5, "idle": False},), "pc-1#1", 1, 2, 3, 4, 5.0, {}, -1),
    Roster(1, (), "", 1, 2, 3, 4, 5.0, {}, -1, 12, 5, served={"keys": 3}, exchange="allreduce:algorithm=ring"),
    Schedule(12, 5, 40),
    Fetch(3, (("w", (2, 3), "float32"),), 0.5),
    Snapshot(1, 2, (3, 4), ((1, 2),), 1, True),
    Publish(1, 2, 3, 0, "ternary:block=128", (100,), 10, 5, 0.25),
    Aggregate(1, 2, "bf16", (0, 3), (1, 1), (10, 10), (("pc-1#1", 4),), 3),
    Chunk(1, 0),
    Credit(1, 2),
    Preempt("behind"),
    Quarantine("norm", "its norm is 1e6 times that of others", 10.0),
    WorkRequest((1, 2), 2, True),
    WorkUnit((3,), False),
    Stop(),
    JoinGroup("default", 4, 2, "a program", "tcp://10.0.0.1:1", "k" * 40, "0a"),
    Forming("default", ("pc-1", "pc-2"), 2),
    Group("default", 3, 1, (("pc-1", "tcp://10.0.0.1:1", "", "0a"), ("pc-2", "tcp://10.0.0.2:1", "", "0b"))),
    GroupLost(1, "silent for 2.1 s", True),
    Leave(12),
    Relay(1, 100),
    Relayed(1, 2),
    Fold(7, "sum", "float32", 100),
    Folded(7, 100),
    Probe(3, 1 << 18, 0),
    Probed(3, 1.7e9, "zmqtrain 0.1.0"),
    Enrol("s-1", 1, 2, "bsp", "sgd:rate=0.1", 4, False),
    Enrolled("s-1", "bsp", "sgd:rate=0.1", 4),
    Declare(1, (("w", (2, 3), "float32"),)),
    Placed(1, (("w", (2, 3), "float32", ((0, 0, 3), (1, 3, 3))),), ()),
    Founded(("w",)),
    Initialise(2, "w", "float32", 3, 3, (12,)),
    Push(3, "w", "float32", True, (12,)),
    Pull(4, "w"),
    Values(1, 4, 7, (12,)),
    Done(2),
    Awaited(("worker-1",), 2),
    Replica(1, 5, (10, 20), 1),
    Books("{}"),
    Holding(5),
    Promote(),
]

ONE_EACH: dict[type[Message], Message] = {type(message): message for message in reversed(EXAMPLES)}
"""The first of each kind."""
