"""Lines that others bring about, as many as somebody may read."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from zmqtrain.session.rate_limited_logger import LINE_SECONDS, MOST_LINES, RateLimitedLogger


def said(caplog):
    """What was said here: another test's threads may say something too."""
    return [record for record in caplog.records if record.name == "zmqtrain.test"]


def test_of_each_kind_so_many_are_said_and_the_others_are_counted(caplog):
    now = [0.0]
    logger = RateLimitedLogger(logging.getLogger("zmqtrain.test"), SimpleNamespace(monotonic=lambda: now[0]))
    with caplog.at_level(logging.INFO, "zmqtrain.test"):
        for number in range(1000):
            logger.warning("sending %s away", number)
        logger.info("%s left", "pc-1")
        assert len(said(caplog)) == MOST_LINES + 1 and said(caplog)[-1].message == "pc-1 left"
        now[0] = LINE_SECONDS
        logger.warning("sending %s away", "the next")
    last = ["980 more lines were like the next one, in the last 10 s", "sending the next away"]
    assert [record.message for record in said(caplog)[-2:]] == last


def test_what_is_not_logged_is_not_counted_and_a_trace_is_there_if_it_is_asked_for(caplog):
    logger = RateLimitedLogger(logging.getLogger("zmqtrain.test"), SimpleNamespace(monotonic=lambda: 0.0))
    with caplog.at_level(logging.WARNING, "zmqtrain.test"):
        for _ in range(2 * MOST_LINES):
            logger.info("quiet")
        try:
            raise ValueError("a bug")
        except ValueError:
            logger.log(logging.ERROR, "it failed", trace=True)
    (record,) = said(caplog)
    assert record.exc_info is not None and "a bug" in caplog.text
