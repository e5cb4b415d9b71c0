"""Two sides of unequal protocol versions: which of them is the older, and the line that upgrades it.

The hub answers in the version of the peer, so that both read it. It says what the hub has; the peer adds what it has
itself. The line for the hub is in the broker's log: peers are not told where its files are.
"""

from __future__ import annotations

from zmqtrain.core.errors import JoinRefused
from zmqtrain.core.installed import how_to_upgrade, package_version
from zmqtrain.protocol.framing import PROTOCOL_VERSION, ProtocolVersionError
from zmqtrain.protocol.messages import Refused, replace_fields

OLDER, NEWER = "older", "newer"
"""Reasons of Refused: the peer's version is older, or newer, than the hub's."""
TYPE = "Type:  "
"""What stands before a command that a message says to type."""


def refuse_version(error: ProtocolVersionError) -> Refused:
    """Return the hub's answer to a peer of another version."""
    if not error.is_number:
        return Refused("protocol", str(error))
    ours = f"the hub has zmqtrain {package_version()} (protocol version {PROTOCOL_VERSION})"
    if error.is_older:
        return Refused(OLDER, f"{ours}, and this PC an older one (protocol version {error.theirs})")
    older = f"older than that of this PC (protocol version {error.theirs})"
    return Refused(NEWER, f"{ours}, {older}. Upgrade the hub: its broker's log says how")


def with_upgrade(refused: Refused) -> Refused:
    """Return a refusal as its receiver reads it: an older one learns also which version is here, and how to upgrade."""
    if refused.reason != OLDER:
        return refused
    here = f"This PC has zmqtrain {package_version()}; upgrade it to the hub's version. {TYPE}{how_to_upgrade()}"
    return replace_fields(refused, text=f"{refused.text}. {here}")


def cannot_join(address: str, error: ProtocolVersionError) -> JoinRefused:
    """Return the error of a peer that cannot read its hub's messages."""
    if not error.is_number:
        return JoinRefused(f"{address}: {error}", "protocol")
    ours = f"this PC's zmqtrain {package_version()} (protocol version {PROTOCOL_VERSION})"
    if not error.is_older:
        text = f"the hub at {address} speaks protocol version {error.theirs}, newer than {ours}. Upgrade this PC"
        return JoinRefused(f"{text}. {TYPE}{how_to_upgrade()}", OLDER)
    text = f"the hub at {address} speaks protocol version {error.theirs}, older than {ours}. Upgrade the hub"
    return JoinRefused(f"{text}, and start its broker again with its --checkpoint", NEWER)
