"""What one broker's machine refuses: what no key can be, what no memory holds, and what cannot be right."""

from __future__ import annotations

import pytest

from tests.parameter_server.servers import SIZES, Server, initialise, kinds
from zmqtrain.core.errors import ConfigError
from zmqtrain.parameter_server.machine import KEY_BYTES, MOST_REQUESTS, Apply, Receive, Rules


@pytest.mark.parametrize(
    "what",
    [
        ("v", "int8", 0, 100, (100,)),
        ("v", "float32", 0, 100, (399,)),
        ("v", "float32", 0, 0, ()),
        ("v", "float32", -1, 100, (400,)),
        ("v", "float64", 0, 100, (400,)),
        ("v", "float32", 0, (1 << 20) + 1, (1 << 20,) * 4 + (4,)),
    ],
)
def test_first_values_of_a_wrong_size_are_refused(what):
    assert initialise(Server(workers="a"), *what)[0].reason == "size"


def test_a_name_that_is_too_long_is_refused():
    assert initialise(Server(workers="a"), "v" * 501, "float32", 0, 100, SIZES)[0].reason == "key"


def test_a_key_that_has_been_pushed_to_is_not_begun_again():
    server = Server(workers="ab").key("w")
    server.key("w")  # its first client was lost half-way, say
    server.push("b")
    assert initialise(server, "w", "float32", 0, 100, SIZES)[0].reason == "key"
    server.machine.lost("b")
    assert initialise(server, "w", "float32", 0, 100, SIZES)[0].reason == "key"


def test_more_keys_than_memory_holds_are_refused():
    server = Server(workers="a", optimizer="adam")
    server.machine.limit_bytes = KEY_BYTES + 5 * 400  # values, what is sent, a gradient, and two of Adam's
    server.key("v")
    assert server.machine.held_bytes == server.machine.limit_bytes
    (refused,) = initialise(server, "w", "float32", 0, 100, SIZES)
    assert refused.reason == "memory" and "more brokers" in refused.text


def test_of_keys_that_are_announced_at_once_those_are_refused_that_do_not_fit():
    server = Server(workers="a")
    server.machine.limit_bytes = KEY_BYTES + 3 * 400
    for key in "vw":
        assert kinds(initialise(server, key, "float32", 0, 100, SIZES)) == ["Receive"]
    assert kinds(server.machine.received("a", 1)) == ["Install", "Confirm"]
    assert server.machine.received("a", 2)[0].reason == "memory"


def test_gradients_that_wait_for_a_step_have_a_bound_whoever_comes_and_goes():
    server = Server("bsp", workers="ab").key("w")
    held = server.machine.held_bytes
    server.machine.limit_bytes = held + 2 * 400
    for stranger in "xyz":  # each leaves a gradient behind: two more than what the key is counted with
        server.machine.enrol(stranger, Rules(), False)
        assert kinds(server.push(stranger)) == ["Confirm"]
        server.machine.lost(stranger)
    assert server.machine.held_bytes == server.machine.limit_bytes
    assert [(one.reason, one.request) for one in server.push("a")] == [("memory", 2)]  # and abstains
    assert kinds(server.push("b")) == ["Refuse", "Apply"]
    assert server.machine.held_bytes == held


def test_who_comes_again_under_its_name_leaves_what_it_had_pushed():
    server = Server("bsp", workers="ab").key("w")
    for _ in range(2):
        server.push("b")
        server.machine.lost("b")
        server.machine.enrol("b", Rules(), False)
    assert Apply("w", (("a", 2), ("b", 1), ("b", 2))) in server.push("a")


def test_the_number_of_a_gradient_that_waits_for_its_step_is_no_new_requests_number_not_even_of_a_client_come_again():
    server = Server("bsp", workers=("a", "b")).key("w")
    server.push("b")
    server.machine.lost("b")
    server.machine.enrol("b", Rules(), False)
    effects = server.machine.push("b", 1, "w", "float32", SIZES, False)
    assert [(effect.reason, "waits for its step" in effect.text) for effect in effects] == [("requests", True)]
    server.numbers["b"] = 1
    server.push("b")
    assert Apply("w", (("a", 2), ("b", 1), ("b", 2))) in server.push("a")
    assert server.machine.push("b", 1, "w", "float32", SIZES, False) == [Receive("b", 1)]


def test_an_optimizer_that_keeps_more_than_there_is_memory_for_is_refused():
    server = Server(workers="a", optimizer="sgd").key("w")
    server.machine.limit_bytes = KEY_BYTES + 4 * 400
    server.machine.lost("a")
    with pytest.raises(ConfigError, match="name an optimizer that keeps less"):
        server.machine.enrol("b", Rules(optimizer="adam"), False)
    assert kinds(server.machine.enrol("b", Rules(optimizer="momentum"), False)) == ["Begin"]
    assert server.machine.held_bytes == server.machine.limit_bytes


def test_who_comes_and_goes_costs_nothing_of_the_keys_that_it_has_not_used():
    server = Server("bsp", workers="ab").key(*"uvw")

    class Untouched(dict):
        def values(self):
            raise AssertionError("all keys were gone through")

    server.push("a")
    server.machine.keys = Untouched(server.machine.keys)
    server.machine.enrol("c", Rules(), False)
    assert server.machine.awaited() == {}
    server.pull("a")
    server.push("c", "v")
    assert server.machine.awaited() == {"a": ("b",)}
    assert kinds(server.machine.lost("b")) == ["Apply", "Answer"]
    assert kinds(server.machine.lost("c")) == []


def test_however_many_pulls_wait_a_push_looks_at_none_that_it_does_not_let_go(monkeypatch):
    server = Server("bsp", workers="abz").key("w")
    server.push("z")
    assert [server.pull("z") for _ in range(100)] == [[]] * 100
    looked_at = []
    is_near = server.machine._is_near
    monkeypatch.setattr(server.machine, "_is_near", lambda asked: looked_at.append(asked) or is_near(asked))
    server.push("a")
    assert len(looked_at) == 1  # its own
    assert kinds(server.push("b")) == ["Confirm", "Apply", *["Answer"] * 100]


@pytest.mark.parametrize(
    ("key", "dtype", "sizes", "reason"),
    [
        ("nothing", "float32", SIZES, "key"),
        ("w", "float32", (404,), "size"),
        ("w", "float32", (200, 200), "size"),
        ("w", "float32", (), "size"),
        ("w", "float64", SIZES, "size"),
    ],
)
def test_a_push_that_cannot_be_right_is_refused_and_costs_nobody_a_clock(key, dtype, sizes, reason):
    server = Server("bsp", workers="ab").key("w")
    (refused,) = server.machine.push("b", 1, key, dtype, sizes, False)
    assert (refused.reason, refused.request) == (reason, 1)
    server.push("a", pull=True)
    assert kinds(server.push("b", pull=True)) == ["Apply", "Answer", "Answer"]


def test_who_has_not_enrolled_is_refused():
    server = Server(workers="a").key("w")
    for effects in (server.push("x"), server.pull("x"), initialise(server, "v", "float32", 0, 1, (4,), worker="x")):
        assert effects[0].reason == "enrol"


def test_a_flood_of_requests_is_refused_and_a_number_twice_too():
    server = Server("bsp", workers="ab").key("w")
    server.push("b")
    for _ in range(MOST_REQUESTS):
        assert server.pull("b") == []
    assert server.pull("b")[0].reason == "requests"
    server.machine.push("a", 50, "w", "float32", SIZES, False)
    assert server.machine.push("a", 50, "w", "float32", SIZES, False)[0].reason == "requests"
    assert kinds(server.machine.received("a", 50))[:3] == ["Confirm", "Apply", "Answer"]


def test_what_comes_of_who_has_left_is_of_no_use():
    server = Server("bsp", workers="ab").key("w")
    server.machine.push("b", 1, "w", "float32", SIZES, False)
    server.machine.lost("b")
    assert (
        server.machine.received("b", 1) == server.machine.broken("b", 1, "size", "") == server.machine.lost("b") == []
    )
