"""Opens a node: its name, keys, checkpoint and brokers. Everything given is checked before and right after Welcome.

A node that is refused leaves nothing behind: no thread and no locked folder.
"""

from __future__ import annotations

import atexit
import socket
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from zmqtrain.checkpoint.folder import CheckpointFolder, every_from_text
from zmqtrain.core.errors import ConfigError, ZmqTrainError
from zmqtrain.core.interfaces import Dialer
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.specs import require_kind
from zmqtrain.core.types import Version
from zmqtrain.monitor.recorder import NodeRecorder
from zmqtrain.node.checkpoint import CheckpointOptions, read_saved
from zmqtrain.node.codec import CodecOn
from zmqtrain.node.node import Node, NodeOptions, open_node
from zmqtrain.node.shards import ShardedNode
from zmqtrain.planning.plans import link_share
from zmqtrain.protocol.messages import Promote, Stop
from zmqtrain.protocol.pipelines import Share
from zmqtrain.session.environment import RealEnvironment
from zmqtrain.transport.address import parse_addresses
from zmqtrain.transport.key_folder import Access, default_key_folder, find_access, find_hub_pair
from zmqtrain.transport.zmq_keys import CurveKeys, GivenKeys, GivenServerKey, read_credentials

NO_CHECKPOINT_IN_LOCKSTEP = (
    "nodes that train synchronously keep no checkpoints: all hold the same parameters, and one that is started again "
    "takes them from the others; leave --checkpoint out here, or --exchange"
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
    events: NodeRecorder | None = None,
    link: str = "",
    share: float = 1.0,
    exchange: str = "",
    checkpoint: str | Path | None = None,
    checkpoint_every: str = "",
    checkpoint_keep: int = 3,
    new_run: bool = False,
    holds: Share | None = None,
    whole: bool = False,
) -> Node | ShardedNode:
    """Connect to the broker at `address` ("tcp://hub:5555") and return the node, welcomed.

    address: or several, "tcp://pc1:5555,tcp://pc2:5555", tried in turn where a standby may have taken over. Of several
    brokers the first is needed; the returned node speaks with all.  name: for people; default: the host's, or that of
    the checkpoint.
    keys: this PC's CURVE pair, or its file (NAME.key_secret), where the hub wants one. Default: HOSTNAME.key_secret,
    lab.key_secret or the only NAME.key_secret in the working folder, the home folder or ~/.config/zmqtrain/keys; on the
    hub itself from the last of these first.  server_key: the hub's public key, or its file; not needed if the file of
    the pair names it.
    codec_on: where deltas are compressed: "host", "device", or "auto": on the device unless that is a processor.
    events: records what happens here, as a `NodeRecorder`.
    link: the rate of this machine's port ("1gbit"; "": as the hub measures it).  share: what training may use of it,
    each way. With no link and the whole share nothing is limited.
    exchange: the name of the way in which this node trains in step with the others, past the broker; the same on all.
    checkpoint: a folder of this node's own, where it saves its state, and from which it goes on as the node that it
    was, without a hub if need be.  checkpoint_every: "60s", or "64" for versions; checkpoint_keep: how many stay.
    new_run: if the hub's run is another than the checkpoint's, set that aside and join; else that is a JoinRefused.
    holds: what this PC has of the model, as one of a pipeline: `PipelineNode` says it.
    whole: this node takes part only where one broker has all of the model; so does one with events, link, share,
    checkpoint or holds.  A script that ends without closing its node says goodbye all the same.
    Raises ConfigError for what cannot be, HubUnreachable when no broker answers, JoinRefused, CheckpointError.
    """
    if not isinstance(address, str) or not address:
        raise ConfigError(f"connect needs the hub's address, such as tcp://192.168.1.10:5555, not {address!r}")
    named, name = name, name or socket.gethostname().partition(".")[0] or "node"
    _check_kinds(name, timeout_seconds, link, share, checkpoint_every, checkpoint)
    if codec_on not in get_args(CodecOn):
        raise ConfigError(f"codec_on must be one of {', '.join(map(repr, get_args(CodecOn)))}, got {codec_on!r}")
    addresses = parse_addresses(address)
    given = link_share(link, share)
    access = find_access(addresses[0], server_key, keys)
    if checkpoint_keep < 1:
        raise ConfigError(f"checkpoint_keep must be at least 1, got {checkpoint_keep}")
    if checkpoint is not None and (exchange or observer):
        raise ConfigError(NO_CHECKPOINT_IN_LOCKSTEP if exchange else NO_CHECKPOINT_OF_OBSERVERS)
    folder = CheckpointFolder(Path(checkpoint), checkpoint_keep) if checkpoint is not None else None
    whole |= bool(link) or share < 1 or not (folder is None and events is None and holds is None)
    options = NodeOptions(
        name=name, addresses=addresses, observer=observer, codec_on=codec_on, events=events, share=given,
        hosts=None if observer else access, exchange=exchange, holds=holds, whole=whole,
        keep=None if folder is None else CheckpointOptions(folder, checkpoint_every),
    )  # fmt: skip
    dialer = RealEnvironment(access)
    if folder is None:
        node = open_node(options, dialer)
    else:
        node = _open_with_checkpoint(options, dialer, named, timeout_seconds, new_run)
    atexit.register(node.close)
    try:
        settings = node.wait_welcome(timeout_seconds)
        if folder is not None:
            _check_checkpoint(settings, checkpoint_every, checkpoint_keep)
        _check_shards(node, settings, bool(link) or share < 1)
    except BaseException:
        node.close()
        raise
    if settings.shards == 1 or observer:
        return node
    several = ShardedNode(node, dialer, timeout_seconds)
    atexit.register(several.close)
    return several


def _check_kinds(
    name: str, timeout_seconds: float, link: str, share: float, checkpoint_every: str, checkpoint: str | Path | None
) -> None:
    require_kind("name", name, str, '"pc1"')
    require_kind("timeout_seconds", timeout_seconds, (int, float), "10.0")
    require_kind("link", link, str, '"1gbit"')
    require_kind("share", share, (int, float), "0.8")
    require_kind("checkpoint_every", checkpoint_every, str, '"60s", or "64" for a count of versions')
    if checkpoint is not None:
        require_kind("checkpoint", checkpoint, (str, Path), '"kept", a folder')
    every_from_text(checkpoint_every)
    if not name.isprintable() or len(name) > 64 or "#" in name:
        raise ConfigError(f"a node's name is at most 64 printable characters without '#', got {name!r}")


def _check_checkpoint(settings: RunSettings, every: str, keep: int) -> None:
    if settings.mode == "strict":
        every_from_text(every, strict=True)
        if keep < 2:
            raise ConfigError(
                "checkpoint_keep must be at least 2 in strict mode: all go back to the newest version that all hold"
            )
    if settings.shards > 1:
        raise ConfigError(
            "a node of several brokers keeps no checkpoint: what it has pending lies at each of them in another "
            "version; leave --checkpoint out here, the brokers may have theirs"
        )


def _check_shards(node: Node, settings: RunSettings, limited: bool) -> None:
    if node.options.observer or settings.shards in (1, AUTO_SHARDS):
        return
    if node.shard:
        raise ConfigError(
            f"the broker at {node.address} has shard {node.shard} of {settings.shards} of its run's model: join "
            f"at the first broker, {', '.join(node.shards)}"
        )
    if node.options.events is not None:
        raise ConfigError("a node of several brokers can be neither recorded nor replayed: leave --record out")
    if limited:
        raise ConfigError(
            "a node of several brokers keeps no share of its link free, as each broker paces its own part only: "
            "leave --link and --share out here; the brokers may have theirs"
        )


def _open_with_checkpoint(
    options: NodeOptions, dialer: Dialer, named: str | None, timeout_seconds: float, new_run: bool
) -> Node:
    """Open the node, going on from the folder's checkpoint if there is one."""
    assert options.keep is not None
    folder = options.keep.folder
    try:
        folder.lock()
        saved = read_saved(folder)
        if saved is not None and named and (former := saved.peer.rpartition("#")[0]) != named:
            raise ConfigError(
                f"the checkpoint in {folder.folder} is of the node {former}, not of {named}: leave the name out to "
                "go on as that one (on one PC only), or name another folder"
            )
        node = open_node(options, dialer, saved)
    except BaseException:
        folder.close()
        raise
    try:
        if saved is None or node.wait_hub_of_checkpoint(timeout_seconds, new_run):
            return node
    except BaseException:
        node.close()
        raise
    node.close()
    folder.lock()
    try:
        folder.set_all_aside()
        return open_node(options, dialer)
    except BaseException:
        folder.close()
        raise


def promote(
    address: str, server_key: GivenServerKey = None, keys: GivenKeys = None, timeout_seconds: float = 10.0
) -> tuple[str, Version, int]:
    """Have the standby at `address` take over its run; return the run's id, its version and its term from then on.

    server_key, keys: the hub's own pair, or its file (hub.key_secret), where the hub has keys; default: that in
    ~/.config/zmqtrain/keys. Without keys the order must come from the standby's own machine.
    A broker that serves a run already changes nothing. Raises HubUnreachable, JoinRefused (this one may not).
    """
    with _operator("promote", address, Promote(), server_key, keys) as node:
        node.wait_welcome(timeout_seconds)
        return node.run, node.peer.run_version, node.peer.term


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

    server_key, keys: as for `promote`; without keys the order must come from the hub's own machine.  timeout_seconds:
    for the broker's answer.  wait_seconds: for the end, and at most so long for the answer.  welcomed: called once the
    broker has answered.
    Raises HubUnreachable, JoinRefused (this one may not), ZmqTrainError if the run has not ended in time.
    """
    with _operator("stop", address, Stop(), server_key, keys) as node:
        node.wait_welcome(min(timeout_seconds, wait_seconds))
        welcomed(node)
        if not node.wait_over(wait_seconds):
            raise ZmqTrainError(
                f"{node.run} has not ended in {wait_seconds:g} s: `zmqtrain status {address}` says who is left; at the "
                "broker Ctrl-C ends it at once, and it saves all it has"
            )
        return node.run, node.peer.run_version if node.roster is None else node.roster.version


def _operator(name: str, address: str, order: Promote | Stop, server_key: GivenServerKey, keys: GivenKeys) -> Node:
    """Return an observer that gives this order to the broker at the address, with the hub's own pair if there is
    one."""
    pair = keys if isinstance(keys, CurveKeys) else CurveKeys.load(keys) if keys else None
    if pair is not None and not pair.server and not server_key:  # the hub's own pair: its file names no other hub
        server_key = pair.public
    found = None if pair or server_key else find_hub_pair(default_key_folder())
    access = found or Access(read_credentials(server_key, pair))
    options = NodeOptions(name=name, addresses=address.split(","), observer=True, order=order)
    return open_node(options, RealEnvironment(access))
