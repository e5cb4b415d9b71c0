"""What peers wrote, where people read it."""

from __future__ import annotations

from zmqtrain.protocol.words import MAX_WORDS, words


def test_words_are_bounded_and_none_moves_a_cursor_or_begins_a_line():
    assert words("a plain sentence") == "a plain sentence"
    assert words("two\nlines \x1b[2J") == "two?lines ?[2J"
    assert len(words("é" * 10**6)) == MAX_WORDS
    assert words("abcdef", 3) == "abc"
