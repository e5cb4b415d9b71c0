"""What `zmqtrain page` decides: where it is served, who needs a token, and what is missing."""

from __future__ import annotations

import importlib.util

import pytest

from zmqtrain.cli import main
from zmqtrain.cli import page as command
from zmqtrain.cli.page import PageConfig, address_of, is_local
from zmqtrain.core.errors import ConfigError


def test_the_page_is_for_this_computer_unless_told():
    assert PageConfig(run="records").place() == ("127.0.0.1", 5560)
    assert PageConfig(run="records", bind="0.0.0.0:80").place() == ("0.0.0.0", 80)
    assert PageConfig(run="records", bind="[::1]:0").place() == ("::1", 0)


@pytest.mark.parametrize("bind", ["5560", "localhost", "127.0.0.1:many", "127.0.0.1:70000", "http://127.0.0.1:80"])
def test_a_place_is_a_host_and_a_port(bind: str):
    with pytest.raises(ConfigError, match="--bind is HOST:PORT"):
        PageConfig(run="records", bind=bind)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("192.168.1.10", False), ("hub", False)),
    ],
)
def test_only_an_address_of_this_computer_alone_goes_without_a_token(host: str, local: bool):
    assert is_local(host) is local


def test_the_address_is_one_that_a_browser_opens():
    assert address_of("127.0.0.1", 5560, "") == "http://127.0.0.1:5560/"
    assert address_of("::1", 5560, "abc") == "http://[::1]:5560/?token=abc"


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find = importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert main(["page", "."]) == 2
    said = capsys.readouterr().err
    assert "the page needs uvicorn" in said and "[page]" in said
