"""Who serves the shards of a run beside the first of its brokers: its nodes, or else the hub's own machine (pure).

Rule 1: once the nodes are here with which the run begins, each shard without a broker is asked of a node that serves
none, in the order in which they came.
Rule 2: a node that says that it does not, leaves, or has served nothing for `HOST_SECONDS`, is asked no more. A shard
that no node is left for is served by the hub's machine; so is one that is left in a run that has begun, because no
other node has its parameters.
Rule 3: the hub's machine follows each broker of a node, as its standby: what a node leaves behind is served there. A
node that is about to leave says so first, so that no exchange has to wait.
Rule 4: in a run that goes on from a checkpoint nobody is asked for `RETURN_SECONDS`: brokers that still serve come back
by themselves.
Rule 5: nodes hear where a shard is served once the hub's machine has reached that broker. One that it does not reach,
because a firewall is closed, is sent away, and the next node is asked. So is one that a node says it does not reach;
in a run that has begun the hub's machine takes its shard over once two nodes say so.
Rule 6: before auto divides a model, the nodes try another port of the hub's machine, and that tries a port of each. If
a node does not reach the hub's machine there is one broker, for what a node leaves would be out of its reach; a node
that is not reached is asked to serve nothing.
Rule 7: where the hub has keys, the broker of a node registers with its node's key, one that was asked for this shard or
has registered it before. It is told the public keys that come in at the hub then, and when they have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zmqtrain.core.settings import AUTO_FRAGMENTS
from zmqtrain.core.types import ModelSpec, PeerId, count_values
from zmqtrain.protocol.effects import AskPorts, FollowShard, HubEffect, SendTo, ServeShard, TakeShard, TryPort
from zmqtrain.protocol.members import Member, ShardRegistry
from zmqtrain.protocol.messages import MAX_WORDS, Host, printable

HOST_SECONDS = 30.0
RETURN_SECONDS = 30.0
MOST_COMPLAINTS = 2
"""So many nodes that do not reach a broker are believed, where others have reached it."""

TRY_SECONDS = 5.0
"""A port is tried for so long."""
ANSWER_SECONDS = 3 * TRY_SECONDS
"""So long nodes have to say whether they reach a port."""
OPEN_SECONDS = 2 * ANSWER_SECONDS
"""So long a port stays open that others try."""

MOST_PORT = 65535

LEAST_VALUES = 1 << 14
"""A fragment of a shard has at least so many values: of fewer the heads would be a large part."""
MOST_SHARDS = 256


def division(nodes: int, model: ModelSpec, fragments: int = AUTO_FRAGMENTS) -> int:
    """Return among how many brokers auto divides a model: one on each of these nodes beside the first, or on half of
    them, or one alone, so that no shard is too small. fragments: of the settings."""
    most = min(MOST_SHARDS, count_values(model) // (LEAST_VALUES * max(1, fragments)))
    return next((shards for shards in (nodes + 1, nodes // 2 + 1) if shards <= most), 1)


@dataclass(frozen=True)
class _Asked:
    """A node that was asked. since: when.  voter: as in `Member`, its key."""

    peer: PeerId
    since: float
    voter: str


@dataclass
class _Trial:
    """Ports tried with one node. since: when it was asked, or the first of those with whom it was awaited.  heard: it
    has answered.  obstacle: why it does not reach the hub's.  serves: the hub reaches its own; None: that is not known
    yet."""

    since: float
    heard: bool = False
    obstacle: str = ""
    serves: bool | None = None


class PortTrials:
    """Who reaches whom at other ports than the hub's, found out before a model is divided."""

    def __init__(self) -> None:
        self._trials: dict[PeerId, _Trial] = {}

    def look(self, nodes: Sequence[Member], now: float) -> tuple[list[HubEffect], list[PeerId] | None, str]:
        """Return what to do, which of these nodes can serve (None: not known yet), and why the model is not divided."""
        known = {node.peer: self._trials[node.peer] for node in nodes if node.peer in self._trials}
        new = tuple(node.peer for node in nodes if node.peer not in known)
        # or those that come and go could put the decision off for ever
        since = min((trial.since for trial in known.values() if trial.serves is None), default=now)
        self._trials = known | {peer: _Trial(since) for peer in new}
        for node in nodes:
            trial = self._trials[node.peer]
            if trial.obstacle:
                return [], [], f"{node.name} does not reach another port of this machine: {trial.obstacle}"
            if not trial.heard and self._is_late(trial, now):
                why = f"{node.name} does not say whether it reaches another port of this machine than the broker's"
                return [], [], why
        if any(trial.serves is None and not self._is_late(trial, now) for trial in self._trials.values()):
            return [AskPorts(new)] if new else [], None, ""
        serving = [peer for peer, trial in self._trials.items() if trial.serves]
        return [], serving, "" if serving else "this machine reaches no other ports of its nodes' than they came from"

    @staticmethod
    def _is_late(trial: _Trial, now: float) -> bool:
        return now - trial.since >= ANSWER_SECONDS

    def answered(self, node: Member, answer: Host) -> list[HubEffect]:
        """A node says whether it reaches the hub's machine; its own port is to be tried then."""
        if (trial := self._trials.get(node.peer)) is None or trial.heard:
            return []
        trial.heard, trial.obstacle = True, printable(answer.text, MAX_WORDS)
        if trial.obstacle:
            return []
        if 0 < answer.port <= MOST_PORT:
            return [TryPort(node.peer, answer.port)]
        trial.serves = False
        return []

    def tried(self, peer: PeerId, reached: bool) -> None:
        """The hub's machine has tried a node's port."""
        if (trial := self._trials.get(peer)) is not None:
            trial.serves = reached


class Hosting:
    """The first broker's part in who serves which shard. start_nodes: with which the run begins.  not_before: in a run
    that goes on, the time before which nobody is asked.

    keys: the public keys that come in at the hub, with their names; {}: it has none; None: they are not read yet.
    """

    def __init__(self, registry: ShardRegistry, start_nodes: int, not_before: float = 0.0) -> None:
        self._start_nodes, self._not_before = start_nodes, not_before
        self.keys: Mapping[str, str] | None = {}
        self.trials = PortTrials()
        self.divided(registry)
        self._asked: dict[int, _Asked] = {}
        self._keyed: dict[int, str] = {}  # shards that are registered with the key of a node
        self._complaints: dict[int, set[PeerId]] = {}
        self._declined: set[PeerId] = set()
        self._here: set[int] = set()  # begun on this machine
        self._followed: set[int] = set()  # of these, as a standby
        self._complete = False  # each shard has been served or followed here

    def divided(self, registry: ShardRegistry) -> None:
        """Take it that these are the run's brokers. In one that goes on, nodes had reached all of them."""
        registry.within_reach = set(range(registry.count) if self._not_before else ())
        self.registry = registry

    @property
    def _within_reach(self) -> set[int]:
        assert self.registry.within_reach is not None
        return self.registry.within_reach

    def look(self, nodes: Sequence[Member], now: float, begun: bool = False) -> list[HubEffect]:
        """Return whom to ask and what to begin on this machine. nodes: that are here, in the order of their coming.
        begun: the run has parameters."""
        addresses = self.registry.registered
        served = [shard for shard in range(1, len(addresses)) if addresses[shard]]
        if not begun:  # a broker that was lost has left nothing: its shard is asked of another node
            lost = {shard for shard in self._followed if not addresses[shard]}
            self._here -= lost
            self._within_reach.difference_update(lost)
            self._followed -= lost
        self._followed.update(shard for shard in served if shard not in self._here)
        effects: list[HubEffect] = [FollowShard(shard, addresses[shard]) for shard in served if shard not in self._here]
        self._here.update(served)
        self._declined.intersection_update([node.peer for node in nodes])  # or it grows with each node that ever came
        self._complete |= len(self._here) == len(addresses) - 1
        if not (self._complete or len(nodes) >= self._start_nodes) or now < self._not_before:
            return effects
        for shard in range(1, len(addresses)):
            if shard not in self._here and (effect := self._next(shard, [] if begun else nodes, now)) is not None:
                effects.append(effect)
        return effects

    def _next(self, shard: int, nodes: Sequence[Member], now: float) -> HubEffect | None:
        here = {node.peer for node in nodes}
        if (asked := self._asked.get(shard)) is not None:
            if asked.peer in here - self._declined and now - asked.since < HOST_SECONDS:
                return None
            self._declined.add(asked.peer)
            del self._asked[shard]
        taken = self._declined | {one.peer for one in self._asked.values()}
        free = next((node for node in nodes if node.peer not in taken), None)
        if free is None:
            self._here.add(shard)
            self._within_reach.add(shard)
            return ServeShard(shard)
        self._asked[shard] = _Asked(free.peer, now, free.voter)
        return SendTo(free.peer, Host(shard))

    def spare(self, peers: Iterable[PeerId]) -> None:
        """Ask these nodes to serve nothing."""
        self._declined.update(peers)

    def declines(self, peer: PeerId, host: Host) -> list[HubEffect]:
        """A node says that it does not serve a shard, or that it is about to leave one. It is believed too where nobody
        was asked for the shard: the broker of the node came back by itself, after a restart."""
        self._declined.add(peer)
        asked = self._asked.get(host.shard)
        its = asked is None or asked.peer == peer
        return [TakeShard(host.shard)] if host.leaves and its and host.shard in self._here else []

    def unreached(self, peer: PeerId, host: Host, begun: bool) -> tuple[list[HubEffect], PeerId | None]:
        """A node does not reach a broker. Return what to do, and who is to be sent away; nothing for a broker that no
        node serves."""
        known, shard = self.registry.registered, host.shard
        if not 0 < shard < len(known) or known[shard] != host.unreached or shard not in self._followed:
            return [], None
        if begun:
            self._complaints.setdefault(shard, set()).add(peer)
            return [TakeShard(shard)] if len(self._complaints[shard]) >= MOST_COMPLAINTS else [], None
        return [], self._given_up(shard)

    def _given_up(self, shard: int) -> PeerId | None:
        """Ask the node that serves a shard no more; return its broker, which is to be sent away."""
        if (asked := self._asked.get(shard)) is not None:
            self._declined.add(asked.peer)
        return self.registry.holder(shard)

    def registered(self, peer: PeerId, shard: int, voter: str, of_hub: bool) -> list[HubEffect]:
        """A broker has registered. voter: its key, as in `Member.voter`; of_hub: that is the hub's."""
        self._complaints.pop(shard, None)
        if of_hub:
            self._keyed.pop(shard, None)
            self._asked.pop(shard, None)
            return []
        self._keyed[shard] = voter
        return [SendTo(peer, Host(shard, keys=dict(self.keys)))] if self.keys else []

    def expects(self, shard: int, voter: str, now: float) -> bool:
        """Return whether a broker with this key (as in `Member.voter`) may register a shard, though its key is not the
        hub's: a node with that key was asked, it has registered it before, or brokers that still serve come back."""
        asked = self._asked.get(shard)
        known = self._keyed.get(shard) == voter or (asked is not None and asked.voter == voter)
        return known or now < self._not_before

    def authorise(self, keys: Mapping[str, str]) -> list[HubEffect]:
        """Tell the brokers that nodes serve which keys come in from now on."""
        before, self.keys = self.keys, keys
        if before == keys:
            return []
        holders = ((shard, self.registry.holder(shard)) for shard in self._keyed)
        return [SendTo(peer, Host(shard, keys=dict(keys))) for shard, peer in holders if peer is not None]

    def reached(self, shard: int, address: str) -> None:
        """The hub's machine has reached the broker of a shard that a node serves at this address."""
        if self.registry.registered[shard] == address:
            self._within_reach.add(shard)

    def out_of_reach(self, shard: int, address: str) -> PeerId | None:
        """The hub's machine does not reach the broker of a shard at this address. Return who is to be sent away, if
        nobody had reached it before."""
        if shard in self._within_reach or self.registry.registered[shard] != address:
            return None
        return self._given_up(shard)

    def ended(self, shard: int) -> None:
        """What this machine had begun for a shard has ended; it is begun again if it is still needed."""
        self._here.discard(shard)
