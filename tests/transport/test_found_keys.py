"""A key file that nobody names is found where `scp` puts it, and where a hub keeps its own."""

from __future__ import annotations

import logging

import pytest

from zmqtrain.transport import key_folder
from zmqtrain.transport.key_folder import Access, KeyFolder, Places, find_access, find_key
from zmqtrain.transport.zmq_keys import CurveKeys, read_credentials

FAR, HERE = "tcp://hub:5555", "tcp://127.0.0.1:5555"


@pytest.fixture
def places(tmp_path, monkeypatch):
    made = Places(tmp_path / "work", tmp_path / "home", tmp_path / "home" / ".config" / "zmqtrain" / "keys", "pc1")
    for folder in (made.working, made.home):
        folder.mkdir(parents=True)
    monkeypatch.setattr(Places, "here", classmethod(lambda cls: made))
    return made


def put(folder, name, server=None):
    """Put a key for some hub there; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = CurveKeys.generate(CurveKeys.generate().public if server is None else server)
    pair.save_secret(folder / f"{name}.key_secret")
    return folder / f"{name}.key_secret"


@pytest.mark.parametrize("where", ["working", "home", "folder"])
@pytest.mark.parametrize("name", ["lab", "pc1", "anything"])
def test_a_key_is_found_in_the_working_folder_the_home_folder_and_the_key_folder(places, where, name):
    path = put(getattr(places, where), name)
    access = find_access(FAR)
    assert access.found == path and access.credentials == read_credentials(None, path)


def test_the_working_folder_comes_before_the_home_folder_and_this_pcs_name_before_the_labs(places):
    put(places.home, "lab")
    put(places.working, "lab")
    assert find_key(places, False).found == places.working / "lab.key_secret"
    put(places.working, "pc1")
    assert find_key(places, False).found == places.working / "pc1.key_secret"


def test_of_several_keys_of_other_names_none_is_chosen_and_it_is_said_where_was_looked(places):
    put(places.home, "pc2")
    put(places.home, "pc3")
    access = find_access(FAR)
    assert access.found is None and access.credentials == (None, None)
    for words in ("lab.key_secret", "pc1.key_secret", str(places.working), str(places.home), str(places.folder)):
        assert words in access.looked


def test_on_the_hub_its_own_folder_comes_first_and_the_hubs_pair_serves_where_each_pc_has_a_key(places):
    put(places.home, "lab")  # of another lab
    keys = KeyFolder(places.folder)
    keys.new(["pc7", "pc8"])
    hub = keys.hub().public
    assert find_access(HERE).found == places.home / "lab.key_secret", "pc7's is pc7's"
    (places.home / "lab.key_secret").unlink()
    access = find_access(HERE)
    assert access.found == places.folder / "hub.key_secret" and access.credentials[0] == hub
    keys.new(["lab"])
    put(places.home, "lab")
    assert find_access(HERE).found == places.folder / "nodes" / "lab.key_secret"
    assert find_access(FAR).found == places.home / "lab.key_secret"


def test_what_is_named_is_used_and_nothing_is_looked_for(places):
    put(places.working, "lab")
    path = put(places.home, "other")
    access = find_access(FAR, None, path)
    assert access.found is None and access.credentials == read_credentials(None, path)
    assert find_access(FAR, None, access) is access


def test_a_file_that_is_no_key_or_names_no_hub_is_passed_over(places, caplog):
    (places.working / "lab.key_secret").write_text("no key\n")
    CurveKeys.generate().save_secret(places.home / "lab.key_secret")
    with caplog.at_level(logging.WARNING, "zmqtrain"):
        assert find_access(FAR).found is None
    assert "is not used" in caplog.text


@pytest.mark.parametrize(("address", "said"), [(FAR, True), (HERE, False)])
def test_a_key_that_was_found_is_left_out_at_a_hub_without_keys_which_is_said_unless_it_is_here(
    places, caplog, address, said
):
    access = find_access(address)
    assert not access.decline(address), "there is none to leave out"
    put(places.home, "lab")
    access = find_access(address)
    with caplog.at_level(logging.WARNING, "zmqtrain"):
        assert access.decline(address) and not access.decline(address)
    assert access.credentials == (None, None)
    assert ("not encrypted" in caplog.text) is said
    assert not Access(access.given).decline(address), "one that was named is never left out"


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        *[("tcp://pc1:5555", True), ("tcp://pc1.lan:5555", True), ("tcp://localhost:1", True), ("tcp://[::1]:1", True)],
        *[("tcp://pc2:5555", False), ("tcp://192.0.2.77:5555", False), ("tcp://pc2:1,tcp://pc1:1", False)],
    ],
)
def test_a_hub_is_known_to_be_this_machine(address, is_here):
    assert key_folder._is_here(address, "pc1") is is_here


def test_a_key_is_given_with_a_tilde_in_python_too(places, monkeypatch):
    path = put(places.home, "lab")
    monkeypatch.setenv("HOME", str(places.home))
    assert read_credentials(None, "~/lab.key_secret") == read_credentials(None, path)
