"""The rules of a run at one broker's machine: who says them, who takes them, and what outlives them."""

from __future__ import annotations

import pytest

from tests.parameter_server.servers import SIZES, Server, initialise, kinds
from zmqtrain.core.errors import ConfigError
from zmqtrain.parameter_server.machine import Answer, Begin, KeyServer, Rules


def test_the_first_client_says_the_rules_and_the_others_take_them():
    server = Server("bounded", workers="a", optimizer="adam")
    server.machine.enrol("b", Rules(), False)
    rules = server.machine.rules
    assert (rules.consistency, rules.optimizer, rules.workers) == (
        "bounded:s=3",
        "adam:rate=0.001,beta1=0.9,beta2=0.999,epsilon=1e-08",
        1,
    )


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Rules(consistency="bsp"), "consistency is 'async' .* a said first; this client says 'bsp'"),
        (Rules(optimizer="sgd:rate=0.5"), "'sgd:rate=0.01' .* 'sgd:rate=0.5'"),
        (Rules(workers=3), "workers is 2 .* says 3"),
        (Rules(shards=2), "shards is 1 .* the same brokers in the same order"),
        (Rules(store="other", shard=1, shards=2), "shards is 1"),
        (Rules(optimizer="nadam"), "there is no 'nadam'"),
        (Rules(shard=3, shards=2), "no such one"),
    ],
)
def test_other_rules_are_refused_naming_both(wanted, words):
    server = Server("async", workers=["a#1", "b"])
    with pytest.raises(ConfigError, match=words):
        server.machine.enrol("c", wanted, False)
    assert not server.machine.serves("c")


def test_a_second_shard_that_is_taken_for_the_first_says_so():
    machine = KeyServer("m2", 1 << 30)
    machine.enrol("a", Rules("m1-1", 1, 2), False)
    with pytest.raises(ConfigError, match="shard is 1"):
        machine.enrol("b", Rules("", 0, 2), False)


def test_when_all_have_left_the_rules_may_change_and_the_keys_stay():
    server = Server("bsp", workers="a").key("w")
    server.machine.lost("a")
    assert server.machine.enrol("b", Rules(optimizer="adam"), False)[0] == Begin(server.machine.rules.optimizer, False)
    assert kinds(server.pull("b")) == ["Answer"]
    assert server.machine.rules.consistency == "bsp"


def test_with_another_number_of_shards_the_keys_are_gone_and_the_store_has_another_name():
    server = Server(workers="a").key("w")
    store = server.machine.rules.store
    server.machine.lost("a")
    (begin,) = server.machine.enrol("b", Rules(shards=2), False)
    assert begin.reset and server.machine.rules.store != store and server.machine.held_bytes == 0
    assert server.pull("b")[0].reason == "key"


def test_a_restored_machine_has_the_keys_and_the_rules_and_waits_for_all_workers():
    server = Server("bsp", workers="ab", optimizer="adam").key("v", "w")
    server.push("a")
    other = Server()
    other.machine.restore(server.machine.state(), {"v": 0, "w": 4})
    assert other.machine.held_bytes == server.machine.held_bytes
    assert other.machine.enrol("c", Rules(server.machine.rules.store), False) == []
    assert other.machine.rules == server.machine.rules and other.machine.missing == 1
    assert other.pull("c") == [Answer("c", 1, "w")]
    assert initialise(other, "w", "float32", 0, 100, SIZES, worker="c")[0].reason == "key"
    assert kinds(initialise(other, "v", "float32", 0, 100, SIZES, worker="c")) == ["Receive"]
