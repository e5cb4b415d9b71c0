"""Give processes that know one address a communicator: over sockets of their own, met at the broker.

Rule: what is said and when is `zmqtrain.collectives`; here it gets its port, and its codecs by their names.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.collectives import communicator
from zmqtrain.collectives.communicator import Op
from zmqtrain.collectives.requests import Request

__all__ = ["Communicator"]


class Communicator(communicator.Communicator):
    """A process's place among the others of its group; its calls are those of `collectives.communicator`."""

    def iallreduce(
        self, x: Any, op: Op = "sum", *, algorithm: str = "auto", codec: Any = None, into: NDArray[Any] | None = None
    ) -> Request:
        """Begin an `allreduce`. codec: a spec such as "int8", or a codec.  Raises ConfigError for one there is not."""
        if isinstance(codec, str):
            codec = codec_from_spec(codec)
        return super().iallreduce(x, op, algorithm=algorithm, codec=codec, into=into)
