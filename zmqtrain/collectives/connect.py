"""Give processes that know one address a communicator: over sockets of their own, met at the broker.

Rule: what is said and when is `zmqtrain.collectives`; here it gets its port, its codecs by their names, and the way in
which Python values are packed (msgpack, never pickle).
"""

from __future__ import annotations

from typing import Any

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.collectives import communicator
from zmqtrain.collectives.communicator import TIMEOUT_SECONDS
from zmqtrain.collectives.rendezvous import open_port
from zmqtrain.protocol.framing import pack_value, unpack_value
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey


class Communicator(communicator.Communicator):
    """A process's place among the others of its group; its calls are those of `collectives.communicator`."""

    @classmethod
    def create(
        cls,
        hub: str,
        size: int,
        rank: int | None = None,
        *,
        group: str = "default",
        name: str | None = None,
        server_key: GivenServerKey = None,
        keys: GivenKeys = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Communicator:
        """Meet `size` processes at the broker at `hub` ("tcp://hub:5555"), and return this one's communicator.

        rank: which of them this one wants to be, from 0; None: by arrival.  group: those who give the same name meet.
        name: for people.  server_key, keys: as for `zmqtrain.connect`, and none is looked for.  timeout_seconds: how
        long to wait for the others, and how long each wait waits that is not told otherwise.
        Raises ConfigError, HubUnreachable, JoinRefused (the others ask for something else), CollectiveTimeout (who is
        here, and how many are missing).
        """
        port = open_port(
            hub, size, rank, group=group, name=name, server_key=server_key, keys=keys, timeout_seconds=timeout_seconds
        )
        return cls(port, timeout_seconds=timeout_seconds)

    def _read_codec(self, codec: Any) -> Any:
        return codec_from_spec(codec) if isinstance(codec, str) else codec

    def _pack_value(self, value: Any) -> bytes:
        return pack_value(value)

    def _unpack_value(self, packed: Any) -> Any:
        return unpack_value(packed)
