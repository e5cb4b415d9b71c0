"""One broker's machine: who waits for whom under each consistency, and that nobody waits for who is lost."""

from __future__ import annotations

from tests.parameter_server.servers import SIZES, Server, kinds
from zmqtrain.parameter_server.machine import Answer, Apply, Confirm, Receive, Refuse, Rules

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
