"""`zmqtrain status --check` against a broker: what probes and scripts go by."""

from __future__ import annotations

import re

import pytest
from runs import broker

from zmqtrain.cli import main
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect


def test_a_check_is_0_where_all_is_well_1_where_something_is_wrong_and_2_where_nobody_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with broker(RunSettings()) as hub:
        assert main(["status", hub.address, "--check"]) == 0
        assert re.fullmatch(r"run-\w+: ok, .*0 nodes.*\n", capsys.readouterr().out)
        assert main(["status", hub.address, "--check", "--node", "pc-1"]) == 1
        assert "no node is named pc-1" in capsys.readouterr().out
        with connect(hub.address, "pc-1"):
            assert main(["status", hub.address, "--check", "--node", "pc-1"]) == 0
    assert main(["status", hub.address, "--check", "--wait-seconds", "0.2"]) == 2
