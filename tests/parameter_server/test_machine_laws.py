"""One broker's machine under whatever its clients do: a ledger of theirs beside the server's."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.grids import examples
from tests.parameter_server.servers import SIZES, Server
from zmqtrain.parameter_server.machine import KEY_BYTES, Answer, Apply, Receive, Rules


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
TestClients.settings = hypothesis_settings(max_examples=examples(40), stateful_step_count=30)
