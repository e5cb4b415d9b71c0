"""Open a node, as whoever trains or looks on asks for it: its name, its keys, its checkpoint, its masters.

Rule: what is given is checked here, before and right after the first Welcome; whoever is refused holds nothing then, no
thread and no folder.
"""

from __future__ import annotations

import atexit
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from zmqtrain.checkpoint.folder import CheckpointFolder, every_from_text
from zmqtrain.core.errors import ConfigError, ZmqTrainError
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.specs import require_kind
from zmqtrain.core.types import PeerId, Version
from zmqtrain.node.coder_place import CodecOn
from zmqtrain.node.keeper import SavedNode, read_saved
from zmqtrain.node.masters import MastersNode
from zmqtrain.node.node import Node
from zmqtrain.planning.auto import link_share
from zmqtrain.protocol.fencing import begin_incarnation
from zmqtrain.protocol.messages import Promote, Stop
from zmqtrain.session.events import NodeEvents
from zmqtrain.transport.address import parse_addresses
from zmqtrain.transport.key_folder import Access, default_key_folder, find_access, find_hub_pair
from zmqtrain.transport.zmq_channels import DealerChannel
from zmqtrain.transport.zmq_keys import CurveKeys, GivenKeys, GivenServerKey, read_credentials

NO_CHECKPOINT_IN_LOCKSTEP = (
    "nodes in lockstep keep no checkpoints: all hold the same parameters, and one that is started again takes them "
    "from the others; leave --checkpoint out here, or --exchange"
)

NO_CHECKPOINT_OF_OBSERVERS = "an observer trains nothing, and has nothing to save: leave checkpoint out (or observer)"


def connect(
    address: str,
    name: str | None = None,
    server_key: GivenServerKey = None,
    keys: GivenKeys | Access = None,
    observer: bool = False,
    timeout_seconds: float = 10.0,
    codec_on: CodecOn = "auto",
    events: NodeEvents | None = None,
    link: str = "",
    share: float = 1.0,
    exchange: str = "",
    checkpoint: str | Path | None = None,
    checkpoint_every: str = "",
    checkpoint_keep: int = 3,
    new_run: bool = False,
) -> Node | MastersNode:
    """Connect to the broker at `address` ("tcp://hub:5555") and return the node, welcomed.

    Where a standby may have taken over, several addresses ("tcp://pc1:5555,tcp://pc2:5555") are tried in turn until one
    welcomes; a node that goes on from its checkpoint tries those too that it had heard of.

    Of several masters it is the first whose address is needed; the node that is returned speaks with all of them.

    A script that ends without closing its node says goodbye all the same.

    name: for people; the host's name if not given, or that of the checkpoint.
    keys: this PC's CURVE pair, or its file (NAME.key_secret), where the hub wants one. If none is given,
    lab.key_secret, HOSTNAME.key_secret or the only NAME.key_secret is taken from the working folder, the home folder or
    ~/.config/zmqtrain/keys; on the hub itself from the last of these first.  server_key: the hub's public key, or its
    file; not needed if the file of the pair names it.
    codec_on: where deltas are compressed: "host", "device", or "auto": on the device unless that is a processor.
    events: who is told what happens here, as a `NodeRecorder`.
    link: the rate of this machine's port ("1gbit"; "": as the hub measures it).  share: what training may use of it,
    each way; the rest is left to others. With no link and the whole share nothing is limited.
    exchange: what people call the way in which this node trains in step with the others, past the broker; all nodes of
    a run have the same.
    checkpoint: a folder of this node's own, where it saves what it can go on from, and goes on from if there is
    something: then it is the node that it was, and needs no hub to begin.  checkpoint_every: after so much time
    ("60s") or so many versions ("64"); checkpoint_keep: how many stay.  new_run: if the hub's run is another than the
    checkpoint's, set that aside and join; else that is a JoinRefused.
    Raises ConfigError for an address that is none, for that of another master than the first and for another choice,
    HubUnreachable when no broker answers, JoinRefused, CheckpointError.
    """
    if not isinstance(address, str) or not address:
        raise ConfigError(f"connect needs the hub's address, such as tcp://192.168.1.10:5555, not {address!r}")
    named = name
    name = name or socket.gethostname().partition(".")[0] or "node"
    require_kind("name", name, str, '"pc1"')
    require_kind("timeout_seconds", timeout_seconds, (int, float), "10.0")
    require_kind("link", link, str, '"1gbit"')
    require_kind("share", share, (int, float), "0.8")
    require_kind("checkpoint_every", checkpoint_every, str, '"60s", or "64" for a count of versions')
    if checkpoint is not None:
        require_kind("checkpoint", checkpoint, (str, Path), '"kept", a folder')
    if not name.isprintable() or len(name) > 64 or "#" in name:
        raise ConfigError(f"a node's name is at most 64 printable characters without '#', got {name!r}")
    if codec_on not in get_args(CodecOn):
        raise ConfigError(f"codec_on must be one of {', '.join(map(repr, get_args(CodecOn)))}, got {codec_on!r}")
    addresses = parse_addresses(address)
    given = link_share(link, share)
    access = find_access(addresses[0], server_key, keys)
    every_from_text(checkpoint_every)
    if checkpoint_keep < 1:
        raise ConfigError(f"checkpoint_keep must be at least 1, got {checkpoint_keep}")
    if checkpoint is not None and (exchange or observer):
        raise ConfigError(NO_CHECKPOINT_IN_LOCKSTEP if exchange else NO_CHECKPOINT_OF_OBSERVERS)
    folder = CheckpointFolder(Path(checkpoint), checkpoint_keep) if checkpoint is not None else None

    def open_channel(address: str, peer: PeerId) -> Callable[[], Channel]:
        return lambda: DealerChannel.connect(address, peer=peer, access=access)

    def open_node(saved: SavedNode | None) -> Node:
        peer = PeerId(f"{name}#{secrets.token_hex(4)}") if saved is None else saved.peer
        return Node(
            open_channel(addresses[0], peer),
            peer,
            peer.rpartition("#")[0],
            ",".join(addresses),
            observer,
            codec_on,
            events,
            given,
            exchange=exchange,
            incarnation=new_incarnation(0 if saved is None else saved.incarnation),
            keep=None if folder is None else (folder, checkpoint_every, saved),
        )

    saved = None
    try:
        if folder is not None:
            folder.lock()
            saved = read_saved(folder)
            if saved is not None and named and (former := saved.peer.rpartition("#")[0]) != named:
                raise ConfigError(
                    f"the checkpoint in {folder.folder} is of the node {former}, not of {named}: leave the name out to "
                    "go on as that one (on one PC only), or name another folder"
                )
        node = open_node(saved)
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    try:
        if saved is not None and not node.wait_hub_of_checkpoint(timeout_seconds, new_run):
            assert folder is not None
            node.close()
            folder.lock()
            try:
                folder.set_all_aside()
                node = open_node(None)
            except BaseException:
                folder.close()
                raise
        atexit.register(node.close)
        settings = node.wait_welcome(timeout_seconds)
        if folder is not None and settings.mode == "strict":
            every_from_text(checkpoint_every, strict=True)
            if checkpoint_keep < 2:
                raise ConfigError(
                    "checkpoint_keep must be at least 2 in strict mode: all go back to the newest version that all hold"
                )
        if settings.masters > 1 and checkpoint is not None:
            raise ConfigError(
                "a node of several masters keeps no checkpoint: what it has pending lies at each of them in another "
                "version; leave --checkpoint out here, the masters may have theirs"
            )
        if node.shard and not observer:
            raise ConfigError(
                f"the broker at {node.address} has shard {node.shard} of {settings.masters} of its run's model: join "
                f"at the first master, {', '.join(node.masters)}"
            )
        if settings.masters > 1 and events is not None:
            raise ConfigError(
                "what happens at a node of several masters cannot be recorded, nor lived again: leave --record out"
            )
        if settings.masters > 1 and (link or share < 1) and not observer:
            raise ConfigError(
                "a node of several masters keeps no share of its link free, as each master paces its own part only: "
                "leave --link and --share out here; the masters may have theirs"
            )
    except BaseException:
        node.close()
        raise
    if settings.masters == 1 or observer:
        return node

    def open_line(address: str) -> Node:
        # a line that is made anew is somebody else: what its master knows of the old one is of no use any more
        line = PeerId(f"{name}#{secrets.token_hex(4)}")
        return Node(
            open_channel(address, line),
            line,
            name,
            address,
            codec_on=codec_on,
            first=node,
            exchange=exchange,
            incarnation=new_incarnation(),
        )

    several = MastersNode(node, open_line, timeout_seconds)
    atexit.register(several.close)
    return several


def promote(
    address: str, server_key: GivenServerKey = None, keys: GivenKeys = None, timeout_seconds: float = 10.0
) -> tuple[str, Version, int]:
    """Have the standby at `address` take over its run; return the run's id, its version and its term from then on.

    server_key, keys: the hub's own pair, or its file (hub.key_secret), where the hub has keys; if none is given, that
    in ~/.config/zmqtrain/keys. Without keys it is told from the standby's own machine.
    A broker that serves a run already changes nothing. Raises HubUnreachable, JoinRefused (of who may not).
    """
    with _operator("promote", address, Promote(), server_key, keys) as told:
        told.wait_welcome(timeout_seconds)
        return told.run, told.run_version, told.term


def stop(
    address: str,
    server_key: GivenServerKey = None,
    keys: GivenKeys = None,
    timeout_seconds: float = 10.0,
    wait_seconds: float = 120.0,
    welcomed: Callable[[Node], None] = lambda node: None,
) -> tuple[str, Version]:
    """End the run at `address`: its nodes send what they have computed and end, its broker saves and ends. Return the
    run's id and its last version, as far as that was heard.

    server_key, keys: as for `promote`; without keys it is told from the hub's own machine.  wait_seconds: for the end.
    welcomed: called once the broker has answered.
    Raises HubUnreachable, JoinRefused (of who may not), ZmqTrainError if the run has not ended in time.
    """
    with _operator("stop", address, Stop(), server_key, keys) as told:
        told.wait_welcome(timeout_seconds)
        welcomed(told)
        if not told.wait_over(wait_seconds):
            raise ZmqTrainError(
                f"{told.run} has not ended in {wait_seconds:g} s: `zmqtrain status {address}` says who is left; at the "
                "broker Ctrl-C ends it at once, and it saves what has come"
            )
        return told.run, told.run_version if told.roster is None else told.roster.version


def _operator(name: str, address: str, order: Promote | Stop, server_key: GivenServerKey, keys: GivenKeys) -> Node:
    """Return an observer that says this order to who is at the address, with the hub's own pair if there is one."""
    peer = PeerId(f"{name}#{secrets.token_hex(4)}")
    pair = keys if isinstance(keys, CurveKeys) else CurveKeys.load(keys) if keys else None
    if pair is not None and not pair.server and not server_key:  # the hub's own pair: its file names no other hub
        server_key = pair.public
    found = None if pair or server_key else find_hub_pair(default_key_folder())
    access = found or Access(read_credentials(server_key, pair))
    return Node(
        lambda: DealerChannel.connect(address, peer=peer, access=access),
        peer,
        name,
        address,
        observer=True,
        order=order,
        incarnation=new_incarnation(),
    )


def new_incarnation(before: int = 0) -> int:
    """Return the incarnation above which this process begins to say Hello.

    before: `Node.incarnation` of the life that it continues, as that saved it.
    """
    return begin_incarnation(before, time.time_ns(), secrets.randbits(20))
