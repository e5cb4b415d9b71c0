"""Whether what welcomes a node is the hub of its run."""

import pytest

from zmqtrain.protocol.fencing import hub_mismatch
from zmqtrain.protocol.messages import Welcome


def welcome(run="run-1", version=5, term=2):
    return Welcome(run, version, {}, term=term)


@pytest.mark.parametrize("run, term, version", [("", 0, -1), ("run-1", 2, 5), ("run-1", 0, 3), ("run-1", 2, -1)])
def test_a_hub_of_the_run_that_knows_as_much_is_believed(run, term, version):
    assert hub_mismatch(welcome(), run, term, version) is None


@pytest.mark.parametrize(
    "code, said, known",
    [
        ("run", "run-1, this node belongs to run-0", ("run-0", 2, 5)),
        (
            "term",
            "that of term 2 of run-1, and its standby has taken over",
            ("run-1", 3, 5),
        ),
        ("version", "at version 5 of run-1, this node has seen 6", ("run-1", 2, 6)),
        ("run", "this node belongs to run-0", ("run-0", 3, 6)),
        ("term", "of term 3", ("run-1", 3, 6)),
    ],
)
def test_any_other_is_not_and_people_are_told_why(code, said, known):
    reason, text = hub_mismatch(welcome(), *known)
    assert reason == code and said in text


def test_who_has_nothing_of_its_run_may_begin_another_but_not_behind_a_takeover():
    assert hub_mismatch(welcome(), "run-0", 2, -1, may_start_over=True) is None
    assert hub_mismatch(welcome(), "run-0", 3, -1, may_start_over=True)[0] == "term"
