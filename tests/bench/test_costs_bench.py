"""The bench of an exchange's costs at toy size: its lines are those that the package's table is made of."""

from __future__ import annotations

import json

from zmqtrain.planning.costs import COSTS, SPARSE_COSTS, CodecCosts, SparseCosts

from costs import main


def test_every_codec_of_the_table_is_measured_and_printed_as_the_table_has_it(tmp_path, capsys):
    written = tmp_path / "costs.json"
    main(["--values", "20000", "--rounds", "2", "--json", str(written)])
    rows = json.loads(written.read_text())["rows"]
    dense, sparse = rows[: len(COSTS)], rows[len(COSTS) :]
    assert [row["codec"] for row in dense] == list(COSTS)
    assert sparse and all(row["codec"].partition(":")[0] in SPARSE_COSTS for row in sparse)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('    "')]
    table = eval("{" + "".join(lines) + "}", {"CodecCosts": CodecCosts, "SparseCosts": SparseCosts})
    assert {*table} == {*COSTS, *SPARSE_COSTS}
    assert [vars(table[row["codec"]]) | {"codec": row["codec"]} for row in dense] == dense
    for row in rows:  # at toy size a time may be nothing
        assert all(value >= 0 for name, value in row.items() if name != "codec")
