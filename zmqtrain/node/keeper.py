"""Keep a node's checkpoints: what its training thread has, and what its exchange has at the same step boundary.

Rule 1: the training thread gives copies and goes on; the codec thread adds what is coded, in its turn, so that it is of
that very boundary; a third thread writes.  Rule 2: what cannot be written is a warning, and is tried again.
Rule 3: in strict mode all save at the same versions, and none is left out: who is still writing is waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.checkpoint.background_writer import BackgroundWriter
from zmqtrain.checkpoint.folder import CheckpointFolder, Every
from zmqtrain.core.errors import CheckpointError, FramingError, ModelMismatch
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, ModelSpec, PeerId, describe_mismatch, spec_from_plain
from zmqtrain.protocol.fencing import MAX_INCARNATION
from zmqtrain.protocol.messages import WireSchedule
from zmqtrain.protocol.schedules import Timetable

logger = logging.getLogger(__name__)

FORMAT = "zmqtrain node 1"
MOST_VERSIONS = 1 << 62
"""A checkpoint that says more versions than this was not written by a node."""

Facts = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class SavedNode:
    """What a node goes on from. versions: of all good checkpoints in the folder, rising.

    facts: by "node", "offers", "units", "coder", "sent" and "loop" what each of these has to know.
    """

    facts: Facts
    arrays: Arrays
    versions: tuple[int, ...] = ()
    peer: PeerId = field(init=False)
    run: str = field(init=False)
    version: int = field(init=False)
    incarnation: int = field(init=False)
    addresses: tuple[str, ...] = field(init=False)
    settings: RunSettings = field(init=False)
    model: ModelSpec = field(init=False)
    schedules: tuple[WireSchedule, ...] = field(init=False)

    def __post_init__(self) -> None:
        node = self.facts["node"]
        for name, value in (
            ("peer", PeerId(str(node["peer"]))),
            ("run", str(node["run"])),
            ("version", int(node["version"])),
            ("incarnation", int(node["incarnation"])),
            ("addresses", tuple(map(str, node.get("addresses", ())))),
            ("settings", RunSettings.from_dict(node["settings"])),
            ("model", spec_from_plain(node["model"])),
            ("schedules", tuple(node.get("schedules", ()))),
        ):
            object.__setattr__(self, name, value)
        Timetable(self.settings, self.schedules)
        if not (-1 <= self.version < MOST_VERSIONS and 0 <= self.incarnation < MAX_INCARNATION):
            raise ValueError(f"version {self.version} and incarnation {self.incarnation} cannot be")
        for name, array in self.arrays.items():
            if name.startswith("anchor/") and array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"the shared parameters {name.removeprefix('anchor/')} are not finite")

    def check_model(self, model: ModelSpec, folder: object) -> None:
        """Raise ModelMismatch, naming the leaf, unless this is the model of the checkpoint."""
        if (difference := describe_mismatch(self.model, model)) is not None:
            text = (
                f"the checkpoint in {folder} is of another model: {difference[1].replace('the run', 'the checkpoint')}"
            )
            raise ModelMismatch(f"{text}. Name another --checkpoint folder", difference[0])


def read_saved(folder: CheckpointFolder, version: int | None = None) -> SavedNode | None:
    """Return the newest checkpoint of a node (or that of a version), None if there is none. Raises CheckpointError."""
    loaded = folder.load() if version is None else folder.load_version(version)
    if loaded is None:
        return None
    facts, arrays = loaded
    if facts.get("format") != FORMAT:
        whose = "a broker's" if "contributions" in facts else "no node's"
        raise CheckpointError(
            f"{folder.folder} holds {whose} checkpoints: the broker and each node have a --checkpoint folder of "
            "their own; name another one for this node"
        )
    try:
        strict = facts["node"]["settings"].get("mode") == "strict"
        versions = folder.good_versions() if strict and version is None else ()
        return SavedNode(facts, arrays, versions)
    except (AttributeError, FramingError, LookupError, ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint in {folder.folder} cannot be read: {error!r}") from error


class NodeKeeper:
    """The checkpoints of one living node: a `Keeping`.

    every: how often.  version: of the parameters that the training thread has.  facts: what the exchange has to know,
    in the training thread.  coded: what the codec has to know besides these facts, in the codec thread; None: it is
    not of the same moment, and nothing is saved.  submit: has that thread do something, after all that it was given
    before; False if it has too much to do.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        every: Callable[[], Every],
        version: Callable[[], int],
        facts: Callable[[], Facts],
        coded: Callable[[Facts], tuple[Facts, Arrays] | None],
        submit: Callable[[Callable[[], None]], bool],
    ) -> None:
        self.folder = folder
        self._every, self._version, self._facts, self._coded, self._submit = every, version, facts, coded, submit
        self.saved: SavedNode | None = None
        """What the node goes on from, until the training thread has taken its part."""
        self._writer = BackgroundWriter("checkpoints of this node", "training")
        self._saved_version, self._saved_at = -1, time.monotonic()

    def take(self) -> tuple[Facts, Mapping[str, Array]] | None:
        """See Keeping."""
        saved, self.saved = self.saved, None
        if saved is None:
            return None
        self._saved_version = saved.version
        return saved.facts["loop"], saved.arrays

    def is_due(self) -> bool:
        """See Keeping."""
        version, now = self._version(), time.monotonic()
        if version < 0 or (self._writer.busy and not self._every().together):
            return False
        return now >= self._writer.retry_at or self._every().is_due(version, self._saved_version, now - self._saved_at)

    def save(self, state: Facts, arrays: Mapping[str, Array], wait: bool = False) -> None:
        """See Keeping."""
        self._writer.begin()
        version = self._version()
        known = {"format": FORMAT, "loop": state, **self._facts()}

        def code() -> None:
            try:
                if (coded := self._coded(known)) is None:
                    return self._writer.put_off("it begins again from the shared parameters just now")
                whole = (version, known | coded[0], {**arrays, **coded[1]})
                self._writer.start(version, lambda: self.folder.save(*whole))
            except BaseException:
                self._writer.cancel()  # or the training thread would wait for this checkpoint forever
                raise

        self._saved_version, self._saved_at = version, time.monotonic()
        if not self._submit(code):
            self._writer.put_off("the codec thread has too much to do")
        elif wait:
            self._writer.wait(None)

    def close(self) -> None:
        """Wait for the write in progress, for a minute at most, and give the folder back."""
        self._writer.wait()
        self.folder.close()
