"""What is simulated: the run's settings, its nodes with their speeds and faults, the wires, and when it is over.

Plain frozen records, checked when they are made.  The faults are those of `zmqtrain.chaos.schedule`; in virtual time

    kill     the node dies and restarts, as another peer, `RESTART_SECONDS` later
    stop     it computes nothing, and nothing gets to it or from it         unplug   only the latter
    slow     it stands still for that share of every `DUTY_SECONDS`
    drop     its connection breaks at the next frame, and it is told        corrupt  so it does at a head; a payload on
    duplicate, reorder   frames come twice, or after later ones                      its way up comes with a bit flipped

What a frame suffers is drawn from the seed, frame by frame, in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Literal

from zmqtrain.chaos.schedule import BROKER, Fault, FaultKind
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.planning.costs import Place
from zmqtrain.train.induce import Induced, induced_from_spec
from zmqtrain.train.program_wrappers import CORRUPTIONS
from zmqtrain.transport.memory import Fate, LinkModel

SPOILT = ("corrupt", "initial_scale", "initial")
"""The fields of a `SimNode` that say how its data and its beginning differ from the program's: its record has them."""


@dataclass(frozen=True, kw_only=True)
class SimNode:
    """One simulated PC. Raises ConfigError for what cannot be.

    step_seconds: one batch takes so long, times slowness.  straggler: a random delay on top of each step: (mean,
    deviation, weight) of each component of a mixture, in seconds, or a text as for a real node ("cedar,scale=0.5", see
    `zmqtrain.train.induce`).  message_sigma: each delta is sent |N(0, sigma)| seconds late.
    pauses: windows (from, to) in which it computes nothing.
    joins_at, leaves_at, killed_at: seconds; who leaves sends what it has pending first, who is killed does not.
    cut: windows (from, to) in which its wire is cut.  corrupt: what is wrong with its data: "", or a kind of
    `zmqtrain.train.program_wrappers`.  initial_scale: its own initial parameters are multiplied by that.
    initial: "diverged": and drowned in noise.  steps: it stops after so many batches; 0: it does not.
    key: name of the key with which it connects, "" for none. Nodes with one key are one voter.
    """

    name: str = ""
    step_seconds: float = 0.05
    slowness: float = 1.0
    straggler: str | tuple[tuple[float, float, float], ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    message_sigma: float = 0.0
    joins_at: float = 0.0
    leaves_at: float = inf
    killed_at: float = inf
    cut: tuple[tuple[float, float], ...] = ()
    corrupt: str = ""
    initial_scale: float = 1.0
    initial: Literal["", "diverged"] = ""
    steps: int = 0
    key: str = ""

    def __post_init__(self) -> None:
        where = f"the node {self.name!r}" if self.name else "a node"
        if not self.name.isprintable() or len(self.name) > 64 or "#" in self.name:
            raise ConfigError(f"a node's name is at most 64 printable characters without '#', got {self.name!r}")
        for name in ("step_seconds", "message_sigma", "joins_at", "leaves_at", "killed_at", "steps"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} of {where} must be at least 0, got {getattr(self, name)}")
        if not self.slowness > 0:
            raise ConfigError(f"slowness of {where} must be more than 0, got {self.slowness:g}")
        if self.initial not in ("", "diverged"):
            raise ConfigError(f'initial of {where} must be "" or "diverged", got {self.initial!r}')
        if self.corrupt and self.corrupt not in CORRUPTIONS:
            choices = ", ".join(f'"{kind}"' for kind in ("", *CORRUPTIONS))
            raise ConfigError(f"corrupt of {where} must be one of {choices}, got {self.corrupt!r}")
        if not isinstance(self.straggler, str) and any(len(part) != 3 for part in self.straggler):
            raise ConfigError(f"straggler of {where} is a list of [mean, deviation, weight], got {self.straggler}")
        self.induced(0)
        for name in ("pauses", "cut"):
            windows = getattr(self, name)
            if any(len(window) != 2 or not 0 <= window[0] <= window[1] for window in windows):
                raise ConfigError(f"{name} of {where} is a list of [from, to] in seconds, got {windows}")

    def induced(self, seed: int) -> Induced:
        """Return this node's random delays. Raises ConfigError."""
        if not isinstance(self.straggler, str):
            return Induced(self.straggler, self.message_sigma, seed)
        induced = induced_from_spec(self.straggler, seed)
        return replace(induced, message_sigma=self.message_sigma) if self.message_sigma else induced

    def done_at(self, now: float, seconds: float) -> float:
        """Return when a computation of so many seconds is done that begins now: pauses put it off."""
        done = now + seconds
        for begin, end in sorted(self.pauses):
            if begin < done and end > now:
                done += end - max(begin, now)
        return done


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulated run. Raises ConfigError for what cannot be.

    link, hub_link: what every node's port can do, and the hub's (None: the same; the latency is link's).
    evaluate_seconds, evaluate_versions: the shared model is scored so often (0: not); it costs no virtual time.
    target_loss: the run is over when it scores so.  max_seconds: or when so much virtual time is over.
    node_codec_ns, hub_codec_ns: time of the codec threads per value that they encode, decode or add.
    codec_scale: instead, codecs take what the planner's table says of them, for a model of so many times the values (0:
    they do not); on the processor or the card of a node (codec_on), and by so many threads there and at the hub
    (node_threads, hub_threads).
    score_nodes: each node's own final parameters are scored too.
    shards_on_nodes: of several brokers the first has the hub's port, and each other shares that of a node; else each
    has a port as the hub's.
    faults: what befalls which node when, besides what the nodes say of themselves.
    """

    settings: RunSettings
    nodes: tuple[SimNode, ...]
    link: LinkModel = field(default_factory=LinkModel)
    hub_link: LinkModel | None = None
    evaluate_seconds: float = 0.0
    evaluate_versions: int = 0
    target_loss: float = -inf
    max_seconds: float = inf
    node_codec_ns: float = 0.0
    hub_codec_ns: float = 0.0
    codec_scale: float = 0.0
    codec_on: Place = "host"
    node_threads: float = 1.0
    hub_threads: float = 1.0
    score_nodes: bool = False
    shards_on_nodes: bool = True
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a scenario needs at least one node")
        names = [node.name or f"node-{number}" for number, node in enumerate(self.nodes)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two nodes have the same name: {', '.join(sorted(twice))}")
        shards = self.settings.shards
        if self.shards_on_nodes and shards > len(self.nodes) + 1:
            raise ConfigError(
                f"shards = {shards}: beside the first each broker is on a node, and there are {len(self.nodes)}; say "
                "fewer shards, or shards_on_nodes = false"
            )
        if shards > 1 and not self.may_be_divided:
            raise ConfigError(
                "losses, cut wires and faults are simulated with one broker: leave them out, or say shards = 1"
            )
        if self.settings.start_nodes > len(self.nodes):
            raise ConfigError(
                f"start_nodes ({self.settings.start_nodes}) is more than there are nodes ({len(self.nodes)}): it would "
                "never begin"
            )
        for name in ("evaluate_seconds", "evaluate_versions", "node_codec_ns", "hub_codec_ns", "codec_scale"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.codec_on not in ("host", "device"):
            raise ConfigError(f'codec_on must be "host" or "device", got {self.codec_on!r}')
        for name in ("node_threads", "hub_threads"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.max_seconds > 0:
            raise ConfigError(f"max_seconds must be more than 0, got {self.max_seconds:g}")
        ends = self.settings.units or self.max_seconds < inf
        if not ends and any(node.steps == 0 and node.leaves_at == inf and node.killed_at == inf for node in self.nodes):
            raise ConfigError(
                "the run would never end: give the run units, every node steps, or the scenario max_seconds"
            )
        if self.target_loss > -inf and not (self.evaluate_seconds or self.evaluate_versions):
            raise ConfigError("target_loss needs evaluate_seconds or evaluate_versions")
        check_faults(self.faults, names)

    @property
    def may_be_divided(self) -> bool:
        """Whether several brokers are simulated: not with faults and losses."""
        return not (self.faults or any(node.cut or node.killed_at < inf for node in self.nodes))

    def named_nodes(self) -> tuple[SimNode, ...]:
        """Return the nodes with their names, and what faults keep them from."""
        named = {
            node.name or f"node-{i}": replace(node, name=node.name or f"node-{i}") for i, node in enumerate(self.nodes)
        }
        for fault in self.faults:
            node, (pauses, cut) = named[fault.target], pauses_and_cuts(fault)
            named[fault.target] = replace(node, pauses=(*node.pauses, *pauses), cut=(*node.cut, *cut))
        return tuple(named.values())


# ---------------------------------------------------------------------- faults

RESTART_SECONDS = 5.0
"""How long a killed node's process takes to begin again."""
DUTY_SECONDS = 1.0
NOISE_KINDS: tuple[FaultKind, ...] = ("corrupt", "duplicate", "reorder")
SIM_KINDS: tuple[FaultKind, ...] = ("kill", "stop", "unplug", "slow", "drop", *NOISE_KINDS)
"""What can befall a simulated node; it has no disk, and nothing in virtual time looks at a wall clock."""
LATE_SECONDS = 0.05
"""A frame that others overtake, and one that comes twice, come at most so much later."""


def check_faults(faults: Sequence[Fault], names: Sequence[str]) -> None:
    """Raise ConfigError for a fault that cannot be simulated, or befalls nobody here."""
    for fault in faults:
        if fault.target == BROKER or fault.kind not in SIM_KINDS:
            raise ConfigError(
                f"{fault} is not simulated: it is played for real by zmqtrain chaos. Here there are "
                f"{', '.join(SIM_KINDS)}, of nodes"
            )
        if fault.target not in names:
            raise ConfigError(f"{fault} befalls nobody: the nodes are {', '.join(names[:10])}, ...")


def pauses_and_cuts(fault: Fault) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
    """Return in which windows (from, to) a fault keeps its node from computing, and in which its wire is cut."""
    window = ((fault.at, fault.ends_at),)
    if fault.kind == "slow":
        turns = (fault.at + DUTY_SECONDS * turn for turn in range(int(fault.seconds / DUTY_SECONDS)))
        return tuple((begin, begin + fault.severity * DUTY_SECONDS) for begin in turns), ()
    return window if fault.kind == "stop" else (), window if fault.kind in ("stop", "unplug") else ()


class FrameNoise:
    """Decides what becomes of the frames of one wire. seed: of what is drawn."""

    def __init__(self, seed: str) -> None:
        self._random, self._shares = Random(seed), dict.fromkeys(NOISE_KINDS, 0.0)
        self._broken = False

    def set(self, kind: FaultKind, share: float) -> None:
        """Do this to a share of the frames from now on; 0: to none."""
        self._shares[kind] = share

    def drop(self) -> None:
        """Break the connection at the next frame."""
        self._broken = True

    def fate(self, payload_up: bool) -> Fate:
        """Return what becomes of the next frame. payload_up: it is of a payload in flight to the hub."""
        if self._broken:
            self._broken = False
            return Fate(breaks=True)
        draw = self._random.random()
        for kind in NOISE_KINDS:
            if draw < self._shares[kind]:
                later = self._random.uniform(0.0, LATE_SECONDS)
                fates: Mapping[str, Fate] = {
                    "corrupt": Fate(flipped=True) if payload_up else Fate(breaks=True),
                    "duplicate": Fate((0.0, later)),
                    "reorder": Fate((later,)),
                }
                return fates[kind]
            draw -= self._shares[kind]
        return Fate()
