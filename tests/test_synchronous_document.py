"""The page of synchronous training: what can be typed is what it says, and every choice is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.local import LocalConfig
from zmqtrain.cli.node import NodeConfig
from zmqtrain.cli.settings import read_config
from zmqtrain.collectives.algorithms import ALLREDUCE
from zmqtrain.synchronous.exchanges import read_exchange
from zmqtrain.train.synchronous import Allreduce, Server

PAGE = (Path(__file__).parents[1] / "docs" / "synchronous.md").read_text()
KINDS = {"zmqtrain-broker": BrokerConfig, "zmqtrain-node": NodeConfig, "zmqtrain local": LocalConfig}


def test_the_defaults_on_the_page_are_those_of_the_code() -> None:
    assert re.findall(r"^    --exchange (\S+)$", PAGE, re.MULTILINE) == [Allreduce().name, Server().name]


@pytest.mark.parametrize("choice", [Allreduce(), Server()], ids=["allreduce", "server"])
def test_every_argument_has_its_line(choice: Allreduce | Server) -> None:
    for argument in re.findall(r"(\w+)=", choice.name):
        assert argument in ("bucket", "timeout") or f"\n- **{argument}**" in PAGE
    assert "\n- **bucket**" in PAGE and "\n- **timeout**" in PAGE


def test_every_algorithm_is_named() -> None:
    (line,) = re.findall(r"^- \*\*algorithm\*\*.*$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", line)) == {*ALLREDUCE, "auto"}


def test_what_is_to_be_typed_is_taken() -> None:
    typed = re.findall(
        r"(?:^|`)(zmqtrain-broker|zmqtrain-node|zmqtrain local) ([^`#\n]*--[^`#\n]*)", PAGE, re.MULTILINE
    )
    assert len(typed) == 4
    for program, arguments in typed:
        read_config(KINDS[program], program, [*arguments.split(), *(["--insecure"] if "--shard" in arguments else [])])


def test_every_exchange_that_is_named_can_be_had() -> None:
    named = {text for text in re.findall(r"`((?:allreduce|server):[^`]+)`", PAGE) if "=" not in text or "next" in text}
    assert len(named) >= 4
    for text in named:
        assert read_exchange(text) is not None
