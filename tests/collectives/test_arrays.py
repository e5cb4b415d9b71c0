"""How trees of arrays are written and read."""

from __future__ import annotations

import ast

from zmqtrain.collectives import arrays


def test_a_text_is_parsed_again_where_another_thread_was_parsing(monkeypatch):
    parse, failed = ast.literal_eval, []

    def fails_twice(text):
        if len(failed) < 2:
            failed.append(text)
            raise SystemError("AST constructor recursion depth mismatch (before=84, after=81)")
        return parse(text)

    monkeypatch.setattr(arrays.ast, "literal_eval", fails_twice)
    assert arrays._literal("[1, (2, 'x')]") == [1, (2, "x")] and len(failed) == 2
