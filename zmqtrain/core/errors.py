"""All errors, in one tree under `ZmqTrainError`.

Rule 1: a message says who, in what state, what came, and what to type next.
Rule 2: facts are attributes, so that a caller never parses a message.
Rule 3: `Local` errors are our own doing, `Remote` ones are a peer's; a remote error costs that peer, nobody else.
"""

from __future__ import annotations


class ZmqTrainError(Exception):
    """The root of the tree; the command line turns any of these into one paragraph and exit code 2 or 78."""


class ConfigError(ZmqTrainError):
    """A setting that cannot be used: its name, its value and the choices are in the message."""


class NotHereYet(ConfigError):
    """A setting that cannot be used now and perhaps later: a name that no name service knows, an address that this PC
    does not have."""


class DoesNotFit(ConfigError):
    """A model that these PCs cannot hold: `segment` is the part that fits none of them, "" if only the whole does not;
    it needs `needed_bytes`, and there are `available_bytes`."""

    def __init__(self, message: str, segment: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.segment, self.needed_bytes, self.available_bytes = segment, needed_bytes, available_bytes


class ModelMismatch(ConfigError):
    """A node's model differs from the run's: `leaf` names the first leaf that does."""

    def __init__(self, message: str, leaf: str = "") -> None:
        super().__init__(message)
        self.leaf = leaf


class DataError(ZmqTrainError):
    """A data file or folder that cannot be read, or does not hold what it should."""


class CodecError(ZmqTrainError):
    """An array that a codec cannot encode, or buffers that it cannot decode; nothing was written."""


class NonFiniteDelta(CodecError):
    """A delta holds NaN or infinity: training has diverged on the node that computed it."""

    def __init__(self, message: str, leaf: str = "") -> None:
        super().__init__(message)
        self.leaf = leaf


class OutlyingDelta(CodecError):
    """A delta is far larger than any that training makes here: something is wrong on the node that computed it."""


class EnormousDelta(OutlyingDelta):
    """A delta is so large that nothing of the training that made it can be trusted, its optimizer's state neither."""


class FramingError(ZmqTrainError):
    """Bytes that are no message of this protocol."""


class ProtocolError(ZmqTrainError):
    """A message that the state of a machine does not allow."""


class LocalProtocolError(ProtocolError):
    """This process asked its own state machine for something that the state does not allow."""


class RemoteProtocolError(ProtocolError):
    """A peer sent a message that its state does not allow; the hub drops that peer and goes on."""

    def __init__(self, peer: str, state: str, message: str) -> None:
        super().__init__(f"{message} from {peer} while it is {state}")
        self.peer, self.state, self.message = peer, state, message


class JoinRefused(ZmqTrainError):
    """The hub refused this node, or this node refused the hub: `reason` is the short code."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class RunStopped(JoinRefused):
    """An operator has ended the run (`zmqtrain stop`): its broker saves it, and every node ends.

    `DelayedSync.step` raises it in a loop that takes no data units; `finish` may be called after it.
    """


class HubUnreachable(ZmqTrainError):
    """No broker answered at `address`. reason: why who is there does not hear this PC (`Channel.refused`), or ""."""

    def __init__(self, message: str, address: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.address, self.reason = address, reason


class AddressInUse(ZmqTrainError):
    """The broker cannot bind `address`."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class ChannelClosed(ZmqTrainError):
    """The channel was closed while something waited on it."""


class ChannelFull(ZmqTrainError):
    """The lane to a peer holds as much as it may, or is not there yet; the sender keeps the message and tries again."""


class PeerLost(ZmqTrainError):
    """There is no connection to `peer`; in a group of processes it had this `rank` (-1: it had none)."""

    def __init__(self, peer: str, why: str = "no connection", rank: int = -1) -> None:
        super().__init__(f"{peer} is lost: {why}")
        self.peer, self.why, self.rank = peer, why, rank


class StageLost(ZmqTrainError):
    """A stage of a pipeline was lost with its copy: its parameters are nowhere any more."""


class CollectiveMismatch(ZmqTrainError):
    """Two ranks of a group made different calls where all must make the same: the message names both."""


class OperationError(ConfigError):
    """A caller's function cannot reduce arrays, or failed at it: the message names it. The call ends with this on all
    ranks that are in it; the communicator goes on."""


class CollectiveTimeout(ZmqTrainError):
    """A wait for other processes ran out: `waiting_for` are their ranks, and the message says what was awaited."""

    def __init__(self, message: str, waiting_for: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.waiting_for = waiting_for


class ReplicasDiffer(ZmqTrainError):
    """Processes that train in step hold different parameters: `leaf` names the first leaf, `ranks` who differs from
    most."""

    def __init__(self, message: str, leaf: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.leaf, self.ranks = leaf, ranks


class AggregateTimeout(ZmqTrainError):
    """A bounded wait for an aggregate ran out (strict mode): the message says what was waited for."""


class SteppedDown(ZmqTrainError):
    """This broker's standby has taken over its run: it serves it no longer."""


class EngineError(ZmqTrainError):
    """An engine was asked for what cannot be: a wait inside an operation, a push after its end, a variable of another
    engine, a look at a variable that an operation has not declared."""


class EngineTimeout(ZmqTrainError):
    """A wait for operations ran out: `operations` are the names of those that hold it up, and the message says how."""

    def __init__(self, message: str, operations: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.operations = operations


class CheckpointError(ZmqTrainError):
    """A checkpoint that cannot be written, or one that is torn or belongs to another run."""
