"""What `--version` prints, of every command."""

from __future__ import annotations

from zmqtrain.core.installed import package_version
from zmqtrain.protocol.framing import PROTOCOL_VERSION


def version_line() -> str:
    return f"zmqtrain {package_version()}, protocol version {PROTOCOL_VERSION}"
