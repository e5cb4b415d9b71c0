"""Where the page of a run comes from: a hub, to which an observer is connected, or files of records."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Protocol

from zmqtrain.core.errors import HubUnreachable, RunStopped, ZmqTrainError
from zmqtrain.monitor.record_files import RecordFolder
from zmqtrain.monitor.tensorboard import RunScalars
from zmqtrain.node.connect import connect
from zmqtrain.node.node import Node
from zmqtrain.page.picture import Picture
from zmqtrain.page.record_feed import RecordFeed
from zmqtrain.page.roster_feed import RosterFeed
from zmqtrain.protocol.messages import Roster, fields_of
from zmqtrain.protocol.peer import PeerState

logger = logging.getLogger(__name__)

LOOK_SECONDS, AGAIN_SECONDS = 0.1, 1.0
FOLDER_SECONDS = 0.5
BATCH_RECORDS, PAUSE_SECONDS = 2000, 0.0005


class Source(Protocol):
    """Fills a picture in a thread of its own, until it is closed."""

    picture: Picture

    def start(self) -> None:
        """Begin to fill it."""

    def close(self) -> None:
        """End the thread, and what it has opened."""


class HubSource:
    """A running hub, seen by an observer that changes nothing; it is looked for again when it is gone.

    addresses: with commas.  server_key, keys: see `connect`.  scalars: are given each report.
    Raises what `connect` does if it cannot be reached now.
    """

    def __init__(
        self,
        addresses: str,
        server_key: str,
        keys: Path | None,
        wait_seconds: float,
        scalars: RunScalars | None = None,
    ) -> None:
        self.picture, self._scalars = Picture(), scalars
        self._feed = RosterFeed(self.picture)
        self._addresses, self._server_key, self._keys = addresses, server_key, keys
        self._wait_seconds = wait_seconds
        self._closed = threading.Event()
        self._node: Node | None = self._connect()
        self.picture.heading.source = self._node.address
        self.picture.heading.note = "waiting for the first report of the broker"
        self._thread = threading.Thread(target=self._run, name="zmqtrain-page-hub", daemon=True)

    def start(self) -> None:
        """See Source."""
        self._thread.start()

    def close(self) -> None:
        """See Source."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if self._node is not None:
            self._node.close()
        if self._scalars is not None:
            self._scalars.close()

    def _connect(self) -> Node:
        node = connect(
            self._addresses, "page", self._server_key, self._keys, observer=True, timeout_seconds=self._wait_seconds
        )
        assert isinstance(node, Node)  # as all observers are
        return node

    def _run(self) -> None:
        shown: Roster | None = None
        while not self._closed.wait(LOOK_SECONDS):
            if self._node is None:
                self._look_again()
                continue
            try:
                self._node.peek()
            except RunStopped as end:
                self._end(str(end))
                continue
            except ZmqTrainError as error:
                self._lose(str(error))
                continue
            if self._node.peer.state is PeerState.CONNECTING:
                self._feed.hub_gone(self._node.link.why_alone)
            elif (roster := self._node.roster) is not None and roster is not shown:
                shown = roster
                self._feed.take(roster, self._node.run, self._node.settings)
                if self._scalars is not None:
                    self._scalars.write(self._node.run, fields_of(roster))

    def _look_again(self) -> None:
        try:
            self._node = self._connect()
        except HubUnreachable:
            pass
        except ZmqTrainError as error:
            self._feed.hub_gone(str(error))
        if self._node is None:
            self._closed.wait(AGAIN_SECONDS)

    def _lose(self, why: str) -> None:
        logger.info("the broker has ended this observer's connection: %s", why)
        self._feed.hub_gone(why)
        self._drop()

    def _end(self, why: str) -> None:
        with self.picture.lock:
            self.picture.heading.state, self.picture.heading.note = "ended", why
        self._drop()

    def _drop(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            node.close()
        self._closed.wait(AGAIN_SECONDS)


class FolderSource:
    """The files of records in a folder (or one file), finished or still written to.

    scalars: are given each report that the records hold.  Raises ConfigError if there is no such place.
    """

    def __init__(self, place: Path, scalars: RunScalars | None = None) -> None:
        self.picture, self._scalars = Picture(), scalars
        self._folder, self._feed = RecordFolder(place), RecordFeed(self.picture, scalars)
        self.picture.heading.source = str(place)
        self.picture.heading.note = "reading the records"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmqtrain-page-records", daemon=True)

    def start(self) -> None:
        """See Source."""
        self._thread.start()

    def close(self) -> None:
        """See Source."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if self._scalars is not None:
            self._scalars.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._read()
            self._closed.wait(FOLDER_SECONDS)

    def _read(self) -> None:
        """Read on, in batches: what reads the picture waits for one batch at most."""
        picture, feed, count = self.picture, self._feed, 0
        reading = iter(self._folder.read())
        while not self._closed.is_set():
            with picture.lock:
                for file, record in reading:
                    feed.take(file, record)
                    if (count := count + 1) % BATCH_RECORDS == 0:
                        break
                else:
                    feed.show(None, self._folder.damaged)
                    if not self._folder.files:
                        picture.heading.note = "no records are here yet: start the broker and the nodes with --record"
                    return
                feed.show(self._read_part(), self._folder.damaged)
            time.sleep(PAUSE_SECONDS)  # for the threads that serve

    def _read_part(self) -> float:
        whole = read = 0
        for file in self._folder.files:
            read += file.read_bytes
            try:
                whole += file.path.stat().st_size
            except OSError:
                whole += file.read_bytes
        return read / whole if whole else 1.0
