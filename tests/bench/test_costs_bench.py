"""The bench of an exchange's costs at toy size: its lines are those that the package's table is made of."""

from __future__ import annotations

import json

from zmqtrain.runtime.planning.costs import COSTS, CodecCosts

from costs import main


def test_every_codec_of_the_table_is_measured_and_printed_as_the_table_has_it(tmp_path, capsys):
    written = tmp_path / "costs.json"
    main(["--values", "20000", "--rounds", "2", "--json", str(written)])
    rows = json.loads(written.read_text())["rows"]
    assert [row["codec"] for row in rows] == list(COSTS)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('    "')]
    table = eval("{" + "".join(lines) + "}", {"CodecCosts": CodecCosts})
    assert [vars(table[row["codec"]]) | {"codec": row["codec"]} for row in rows] == rows
    assert all(value > 0 for cost in table.values() for name, value in vars(cost).items() if name != "subtract_ns")
    assert all(cost.subtract_ns >= 0 for cost in table.values())  # a difference of two: at toy size it may be nothing
