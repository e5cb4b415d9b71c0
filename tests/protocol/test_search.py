"""When a node says Hello, and where."""

from zmqtrain.protocol.peer import (
    ANSWER_SECONDS,
    FIRST_BACKOFF_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    MOST_LEARNT,
    Search,
)

FIRST, SECOND = "tcp://one:1", "tcp://two:2"


def attempts(search, count, now=0.0):
    """Let attempts begin as soon as they are due; return the addresses, and when the last one began."""
    found = []
    for _ in range(count):
        while not search.is_due(now):
            now += 0.01
        found.append(search.next_address())
        search.began(now)
    return found, now


def test_the_first_attempt_goes_over_the_connections_that_are_there_and_the_next_over_new_ones():
    search = Search("a", ())
    assert search.is_due(0.0) and attempts(search, 3)[0] == [None, "", ""]


def test_an_attempt_is_given_its_time_and_the_times_grow_until_somebody_answers():
    search = Search("a", ())
    search.began(0.0)
    assert not search.is_due(ANSWER_SECONDS - 0.01) and search.is_due(ANSWER_SECONDS + FIRST_BACKOFF_SECONDS)
    _, began = attempts(search, 20)
    assert not search.is_due(began) and search.is_due(began + ANSWER_SECONDS + LONGEST_BACKOFF_SECONDS)
    search.backoff.reset()
    search.began(100.0)
    assert search.is_due(100.0 + ANSWER_SECONDS + FIRST_BACKOFF_SECONDS)


def test_the_addresses_are_taken_in_turn_as_given_and_then_as_heard_of():
    search = Search("a", [FIRST])
    assert attempts(search, 2)[0] == [None, ""], "one address is no choice"
    search.know(SECOND)
    assert attempts(search, 3, 10.0)[0] == [SECOND, FIRST, SECOND]


def test_who_was_given_no_address_looks_for_no_standby():
    search = Search("a", ())
    search.know(SECOND)
    assert search.addresses == ()


def test_only_the_newest_standbys_are_known_and_each_once():
    search = Search("a", [FIRST])
    for number in (1, 1, *range(2, 9)):
        search.know(f"tcp://standby:{number}")
    search.know(FIRST), search.know("")
    assert search.addresses == (FIRST, *[f"tcp://standby:{number}" for number in range(9 - MOST_LEARNT, 9)])


def test_a_standby_that_was_forgotten_while_the_node_looked_there_leads_back_to_the_first():
    search = Search("a", [FIRST])
    search.know(SECOND)
    assert attempts(search, 2)[0] == [None, SECOND]
    for number in range(MOST_LEARNT):
        search.know(f"tcp://standby:{number}")
    assert SECOND not in search.addresses and attempts(search, 1, 10.0)[0] == [FIRST]


def test_a_hub_that_is_lost_is_looked_for_where_it_was_first_and_one_that_is_not_believed_elsewhere():
    search = Search("a", [FIRST, SECOND])
    attempts(search, 1)
    search.lost(5.0, elsewhere=False)
    assert not search.is_due(4.9) and search.is_due(5.0) and search.next_address() is None
    search.lost(5.0, elsewhere=True)
    assert search.next_address() == SECOND
    alone = Search("a", [FIRST])
    alone.lost(5.0, elsewhere=True)
    assert alone.next_address() is None, "there is no other"
