"""What peers wrote, where people read it."""

from __future__ import annotations

import msgspec
import pytest

from zmqtrain.protocol.framing import decode_message, encode_message
from zmqtrain.protocol.messages import MAX_SENTENCE, MAX_WORDS, Goodbye, GroupLost, Quarantine, Refused, printable


def test_words_are_bounded_and_none_moves_a_cursor_or_begins_a_line():
    assert printable("a plain sentence") == "a plain sentence"
    assert printable("two\nlines \x1b[2J") == "two?lines ?[2J"
    assert len(printable("é" * 10**6)) == MAX_WORDS
    assert printable("abcdef", 3) == "abc"


@pytest.mark.parametrize("kind", [Refused, Quarantine, Goodbye, GroupLost])
def test_a_sentence_of_a_message_that_is_decoded_moves_no_cursor(kind):
    hostile = "\x1b[2J[/red]\n" * 1000
    fields = {name: hostile for name in ("reason", "text", "why") if name in kind.__struct_fields__}
    numbers = {"seconds": 1.0, "group": "g", "rank": 0}
    sent = kind(**fields, **{name: one for name, one in numbers.items() if name in kind.__struct_fields__})
    for name in fields:
        msgspec.structs.force_setattr(sent, name, hostile)  # as a hostile program would send it
    received = decode_message(encode_message(sent))
    for name in fields:
        assert getattr(received, name).isprintable() and len(getattr(received, name)) <= MAX_SENTENCE
