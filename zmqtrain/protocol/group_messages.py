"""Say what the processes of a group and the hub, and these processes among each other, tell each other.

Rule: as in `messages`, which lists these too.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.protocol.words import MAX_SENTENCE, words

WireProcess = tuple[str, str, str, str]
"""One process of a group: its name, its address, its public CURVE key ("": none), and its token, which the connections
of the others to it must carry."""


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Process to hub: let me meet the others of `group`, of `size` processes who all give the same `description`.

    rank: which of them I want to be; -1: any.  address, key, token: as in WireProcess.
    """

    group: str
    size: int
    rank: int = -1
    description: str = ""
    address: str = ""
    key: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class Forming:
    """Hub to process: your group waits for `missing` more. here: the names of those who have come, in that order."""

    group: str
    here: tuple[str, ...]
    missing: int


@dataclass(frozen=True, slots=True)
class Group:
    """Hub to process: your group is complete, and you are its `rank`. members: by rank.

    generation: one number for each group that was ever complete at this hub.
    """

    group: str
    generation: int
    rank: int
    members: tuple[WireProcess, ...]


@dataclass(frozen=True, slots=True)
class GroupLost:
    """Hub to process: that rank of your group is gone for good, perhaps yourself. Process to hub: so I think; likewise
    process to process, where the hub does not answer.  left: it said goodbye.
    """

    rank: int
    why: str
    left: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", words(self.why, MAX_SENTENCE))


@dataclass(frozen=True, slots=True)
class Leave:
    """Process to process: I leave the group once you have had so many `messages` of mine."""

    messages: int


@dataclass(frozen=True, slots=True)
class Relay:
    """Process to process through the hub: what comes behind it, `size` bytes. rank: the receiver's on the way up, the
    sender's on the way down."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Relayed:
    """The receiver of relayed messages has had `messages` more of them; to the sender, through the hub.

    rank: the sender's on the way up, the receiver's on the way down.
    """

    rank: int
    messages: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Process to hub: reduce this chunk with that of every other rank. `size` bytes come behind it, in frames: the last
    one is the values, those before it are the sender's own and come back.

    key: of one reduction all ranks send their chunks with the same key, in one order.  op, dtype: as in HubChunk.
    """

    key: int
    op: str
    dtype: str
    size: int


@dataclass(frozen=True, slots=True)
class Folded:
    """Hub to process: a chunk of all ranks, reduced, in the frames behind it: the receiver's own of its Fold, and the
    values."""

    key: int
    size: int


GroupMessage = JoinGroup | Forming | Group | GroupLost | Leave | Relay | Relayed | Fold | Folded
