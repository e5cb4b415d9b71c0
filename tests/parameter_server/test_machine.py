"""One master's machine: who waits for whom under each consistency, and that nobody waits for who is lost or wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zmqtrain.errors import ConfigError
from zmqtrain.parameter_server.effects import Answer, Apply, Begin, Confirm, Install, Receive, Refuse
from zmqtrain.parameter_server.machine import KEY_BYTES, MOST_REQUESTS, KeyServer
from zmqtrain.parameter_server.rules import Rules

SIZES = (400,)


class Server:
    """A machine, and what a living half does for it at once: payloads that are let in are whole at the next word."""

    def __init__(self, consistency="async", workers=(), expected=0, **rules):
        self.machine = KeyServer("m", 1 << 30)
        self.numbers = Counter()
        for worker in workers:
            wanted = Rules(consistency=consistency, workers=expected or len(workers), **rules)
            self.machine.enrol(worker, wanted, False)

    def number(self, worker):
        self.numbers[worker] += 1
        return self.numbers[worker]

    def key(self, *keys, worker="a"):
        for key in keys:
            number = self.number(worker)
            assert self.machine.initialise(worker, number, key, "float32", 0, 100, SIZES) == [Receive(worker, number)]
            assert self.machine.received(worker, number) == [
                Install(worker, number, key, "float32"),
                Confirm(worker, number),
            ]
        return self

    def push(self, worker, key="w", pull=False):
        """Push, and let the payload come if it may; return the effects after that, or [] if it may not."""
        number = self.number(worker)
        effects = self.machine.push(worker, number, key, "float32", SIZES, pull)
        return self.machine.received(worker, number) if effects == [Receive(worker, number)] else effects

    def pull(self, worker, key="w"):
        return self.machine.pull(worker, self.number(worker), key)


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


# ---------------------------------------------------------------------- asynchronous


def test_an_asynchronous_push_is_applied_at_once_and_answered_with_what_holds_it():
    server = Server(workers="ab").key("w")
    assert server.push("a") == [Apply("w", (("a", 2),)), Confirm("a", 2)]
    assert server.push("b", pull=True) == [Apply("w", (("b", 1),)), Answer("b", 1, "w")]
    for _ in range(100):
        assert kinds(server.push("a", pull=True)) == ["Apply", "Answer"]


def test_a_pull_waits_for_the_workers_own_pushes_that_are_on_their_way():
    server = Server(workers="ab").key("w")
    server.machine.push("b", 1, "w", "float32", SIZES, False)
    assert server.machine.pull("b", 2, "w") == []
    assert server.pull("a") == [Answer("a", 2, "w")]
    assert server.machine.received("b", 1) == [Apply("w", (("b", 1),)), Confirm("b", 1), Answer("b", 2, "w")]


# ---------------------------------------------------------------------- bulk synchronous


def test_under_bsp_one_step_is_made_of_all_gradients_in_the_order_of_names():
    server = Server("bsp", workers="abc").key("w")
    assert server.push("c", pull=True) == []
    assert server.push("a") == [Confirm("a", 2)]
    assert server.pull("a") == []
    assert server.push("b") == [
        Confirm("b", 1),
        Apply("w", (("a", 2), ("b", 1), ("c", 1))),
        Answer("c", 1, "w"),
        Answer("a", 3, "w"),
    ]


def test_under_bsp_a_second_push_is_not_let_in_before_the_first_step():
    server = Server("bsp", workers="ab").key("w")
    server.push("a")
    assert server.machine.push("a", 9, "w", "float32", SIZES, False) == []
    assert server.push("b")[-1] == Receive("a", 9)


def test_under_bsp_keys_do_not_wait_for_each_other():
    server = Server("bsp", workers="ab").key("v", "w")
    server.push("a", "v")
    assert kinds(server.push("a", "w") + server.push("b", "w")) == ["Confirm", "Confirm", "Apply"]


def test_a_lost_worker_is_not_waited_for_and_what_it_had_pushed_counts():
    server = Server("bsp", workers="abc").key("w")
    server.push("a", pull=True)
    server.push("b")
    assert server.machine.lost("b") == []
    assert server.machine.lost("c") == [Apply("w", (("a", 2), ("b", 1))), Answer("a", 2, "w")]
    assert kinds(server.push("a", pull=True)) == ["Apply", "Answer"]


def test_a_gradient_that_is_refused_on_its_way_abstains():
    server = Server("bsp", workers="ab").key("w")
    server.push("a", pull=True)
    server.machine.push("b", 1, "w", "float32", SIZES, True)
    effects = server.machine.broken("b", 1, "non-finite", "a value is not finite")
    assert effects[0] == Refuse("b", 1, "non-finite", "push of 'w': a value is not finite")
    assert effects[1:] == [Apply("w", (("a", 2),)), Answer("a", 2, "w")]


def test_no_step_is_made_before_all_workers_have_enrolled():
    server = Server("bsp", workers="ab", expected=3).key("w")
    assert server.machine.missing == 1
    server.push("a", pull=True)
    assert server.push("b") == [Confirm("b", 1)]
    assert server.machine.enrol("c", Rules(), False) == [] and server.machine.missing == 0
    assert kinds(server.push("c", pull=True)) == ["Apply", "Answer", "Answer"]


def test_who_comes_later_counts_from_its_first_push_on():
    server = Server("bsp", workers="ab").key("w")
    server.machine.enrol("late", Rules(), False)
    server.push("a")
    assert kinds(server.push("b")) == ["Confirm", "Apply"]
    assert server.pull("late") == [Answer("late", 1, "w")]
    server.push("late")
    server.push("a")
    assert server.push("b")[-1] == Apply("w", (("a", 3), ("b", 2), ("late", 2)))
    server.push("a")
    assert kinds(server.push("b")) == ["Confirm"]  # now late is waited for


def test_who_only_reads_is_never_waited_for_and_may_not_push():
    server = Server("bsp", workers="a").key("w")
    server.machine.enrol("reader", Rules(), True)
    assert kinds(server.push("a", pull=True)) == ["Apply", "Answer"]
    assert server.pull("reader") == [Answer("reader", 1, "w")]
    assert server.push("reader")[0].reason == "reads"


def test_those_who_come_when_all_have_gone_begin_at_the_clock_that_they_find():
    server = Server("bsp", workers="ab").key("w")
    for _ in range(3):
        server.push("a")
        server.push("b")
    server.push("a")  # of a step that b does not make
    server.machine.lost("a")
    server.machine.lost("b")
    assert server.machine.enrol("c", Rules(), False) == [Apply("w", (("a", 5),))]
    assert server.machine.enrol("d", Rules(), False) == []
    server.push("c", pull=True)
    assert kinds(server.push("d", pull=True)) == ["Apply", "Answer", "Answer"]


def test_whom_a_worker_waits_for_is_known():
    server = Server("bsp", workers="abc").key("w")
    server.push("a", pull=True)
    server.push("b")
    assert server.machine.awaited() == {"a": ("c",)}
    server.machine.push("b", 9, "w", "float32", SIZES, False)
    assert server.machine.awaited() == {"a": ("c",), "b": ("c",)}
    server.push("c")
    assert server.machine.awaited() == {}


def test_own_pushes_that_are_on_their_way_are_nobody_elses_fault():
    server = Server(workers="ab").key("w")
    server.machine.push("b", 1, "w", "float32", SIZES, False)
    server.pull("b")
    assert server.machine.awaited() == {}


# ---------------------------------------------------------------------- bounded


def test_a_bounded_worker_runs_ahead_by_s_and_no_more():
    server = Server("bounded:s=2", workers="ab").key("w")
    for _ in range(2):
        assert kinds(server.push("a", pull=True)) == ["Apply", "Answer"]
    assert kinds(server.push("a", pull=True)) == ["Apply"]  # its clock is 3, b's is 0
    assert server.machine.push("a", 99, "w", "float32", SIZES, True) == []
    assert kinds(server.push("b", pull=True)) == ["Apply", "Answer", "Receive", "Answer"]


def test_a_bounded_worker_that_is_lost_frees_the_others():
    server = Server("bounded:s=0", workers="ab").key("w")
    assert kinds(server.push("a", pull=True)) == ["Apply"]
    assert kinds(server.machine.lost("b")) == ["Answer"]


# ---------------------------------------------------------------------- rules


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
        (Rules(masters=2), "masters is 1 .* the same masters in the same order"),
        (Rules(store="other", master=1, masters=2), "masters is 1"),
        (Rules(optimizer="nadam"), "there is no 'nadam'"),
        (Rules(master=3, masters=2), "no such one"),
    ],
)
def test_other_rules_are_refused_naming_both(wanted, words):
    server = Server("async", workers=["a#1", "b"])
    with pytest.raises(ConfigError, match=words):
        server.machine.enrol("c", wanted, False)
    assert not server.machine.serves("c")


def test_a_second_master_that_is_taken_for_the_first_says_so():
    machine = KeyServer("m2", 1 << 30)
    machine.enrol("a", Rules("m1-1", 1, 2), False)
    with pytest.raises(ConfigError, match="master is 1"):
        machine.enrol("b", Rules("", 0, 2), False)


def test_when_all_have_left_the_rules_may_change_and_the_keys_stay():
    server = Server("bsp", workers="a").key("w")
    server.machine.lost("a")
    assert server.machine.enrol("b", Rules(optimizer="adam"), False)[0] == Begin(server.machine.rules.optimizer, False)
    assert kinds(server.pull("b")) == ["Answer"]
    assert server.machine.rules.consistency == "bsp"


def test_with_another_number_of_masters_the_keys_are_gone_and_the_store_has_another_name():
    server = Server(workers="a").key("w")
    store = server.machine.rules.store
    server.machine.lost("a")
    (begin,) = server.machine.enrol("b", Rules(masters=2), False)
    assert begin.anew and server.machine.rules.store != store and server.machine.held_bytes == 0
    assert server.pull("b")[0].reason == "key"


# ---------------------------------------------------------------------- what cannot be


def initialise(server, *what, worker="a"):
    return server.machine.initialise(worker, server.number(worker), *what)


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
    assert refused.reason == "memory" and "more masters" in refused.text


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


# ---------------------------------------------------------------------- laws


class Clients(RuleBasedStateMachine):
    """Workers that push, pull, come and go as they like, under any consistency: a ledger of theirs beside the server's.

    done: the pushes of a worker that were answered or confirmed.  applied: (worker, request) in the order of the steps.
    """

    @initialize(consistency=st.sampled_from(["bsp", "async", "bounded:s=0", "bounded:s=2"]))
    def begin(self, consistency):
        self.server = Server(consistency, workers="abc").key("w")
        self.rule = self.server.machine.consistency
        self.here = set("abc")
        self.pushed = Counter()  # by worker, let in and whole
        self.on_their_way = {}
        self.waiting = {}
        self.applied = []
        self.names = 0

    def see(self, effects):
        for effect in effects:
            match effect:
                case Apply(_, payloads):
                    assert list(payloads) == sorted(payloads) and len({w for w, _ in payloads}) == len(payloads)
                    self.applied += payloads
                case Receive(worker, request):
                    assert worker in self.here
                    self.on_their_way[worker, request] = self.waiting.pop((worker, request))
                case Answer(worker, request):
                    wants = self.waiting.pop((worker, request))
                    assert self.pushed[worker] >= wants
                    own = sum(who == worker for who, _ in self.applied)
                    assert own == self.pushed[worker] or self.rule.averages
                    if self.rule.averages:
                        assert own >= wants

    @precondition(lambda self: self.here)
    @rule(data=st.data(), pull=st.booleans())
    def push(self, data, pull):
        worker = data.draw(st.sampled_from(sorted(self.here)))
        number = self.server.number(worker)
        self.waiting[worker, number] = pull
        self.see(self.server.machine.push(worker, number, "w", "float32", SIZES, pull))

    @precondition(lambda self: self.on_their_way)
    @rule(data=st.data(), sound=st.booleans())
    def arrive(self, data, sound):
        (worker, number) = data.draw(st.sampled_from(sorted(self.on_their_way)))
        pull = self.on_their_way.pop((worker, number))
        if sound:
            self.pushed[worker] += 1
            if pull:
                self.waiting[worker, number] = self.pushed[worker]
            self.see(self.server.machine.received(worker, number))
        else:
            self.see(self.server.machine.broken(worker, number, "non-finite", "no"))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def pull(self, data):
        worker = data.draw(st.sampled_from(sorted(self.here)))
        number = self.server.number(worker)
        self.waiting[worker, number] = self.pushed[worker]
        self.see(self.server.machine.pull(worker, number, "w"))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def lose(self, data):
        worker = data.draw(st.sampled_from(sorted(self.here)))
        self.here.discard(worker)
        for book in (self.waiting, self.on_their_way):
            for name in [name for name in book if name[0] == worker]:
                del book[name]
        self.see(self.server.machine.lost(worker))

    @rule()
    def come(self):
        self.names += 1
        worker = f"d{self.names}"
        alone = Rules(workers=1) if not self.here else Rules()
        self.here.add(worker)
        self.server.machine.enrol(worker, alone, False)

    @invariant()
    def nobody_waits_without_somebody_to_wait_for(self):
        alone = len(getattr(self, "here", "")) == 1
        if hasattr(self, "here") and (alone or self.rule.staleness is None) and not self.on_their_way:
            assert not self.waiting

    @invariant()
    def memory_is_that_of_the_key_and_of_the_gradients_that_wait(self):
        if hasattr(self, "server"):
            (key,) = self.server.machine.keys.values()
            assert self.server.machine.held_bytes == KEY_BYTES + 3 * 400 + 400 * max(0, len(key.round) - 1)
            assert self.server.machine.value_bytes == 400

    def teardown(self):
        """Whoever is left, once the others have gone and its own pushes are whole, waits for nothing."""
        for worker in sorted(getattr(self, "here", ()))[1:]:
            self.here.discard(worker)
            for book in (self.waiting, self.on_their_way):
                for name in [name for name in book if name[0] == worker]:
                    del book[name]
            self.see(self.server.machine.lost(worker))
        while getattr(self, "on_their_way", None):
            (worker, number), pull = self.on_their_way.popitem()
            self.pushed[worker] += 1
            if pull:
                self.waiting[worker, number] = 0
            self.see(self.server.machine.received(worker, number))
        assert not getattr(self, "waiting", None)


TestClients = Clients.TestCase
TestClients.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)
