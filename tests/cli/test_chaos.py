"""`zmqtrain chaos`: what it refuses, and how it says what came of a run."""

from __future__ import annotations

import io
from math import nan

import pytest
from rich.console import Console

from zmqtrain.broker.checkpoint import History
from zmqtrain.chaos.run import FaultEvent, Outcome
from zmqtrain.chaos.schedule import Fault
from zmqtrain.cli import main
from zmqtrain.cli.chaos import outcome_table
from zmqtrain.monitor.ledger import Audit


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "1"], "at least 2 nodes"),
        (["--faults", "kil"], "there is no fault 'kil'; the faults are kill"),
        (["--faults", "kill", "corrupt"], "a fault of network frames"),
        (["--broker-kills", "-1"], "at least 0"),
        (["--folder", "."], "is not empty"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments, words, capsys, monkeypatch, tmp_path):
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", *arguments]) == 2
    assert words in capsys.readouterr().err


def printed(*faults):
    audit = Audit(faults, 12, 16, 15, 9_500, 10_000, 4)
    history = History("run-1", 0, 12, {}, (0, 5, 12), ())
    events = (
        FaultEvent(Fault(1.0, "kill", "node-1"), 5.0),
        FaultEvent(Fault(2.0, "stop", "node-2", 3.0), 6.0, "no such process"),
    )
    outcome = Outcome(audit, history, nan if faults else 2.5, not faults, 40.0, 2, events)
    console = Console(width=200, file=io.StringIO())
    console.print(outcome_table(outcome))
    return console.file.getvalue()


def test_the_table_says_what_was_done_and_what_it_cost():
    text = printed()
    for words in ("1 done, 1 could not be", "2 processes, none by hand", "0.95", "15 acknowledged, 1 of nodes", "once"):
        assert words in text
    text = printed("offer 3 of pc-1 landed twice")
    assert "1 faults" in text and "not all came to their end in time" in text
