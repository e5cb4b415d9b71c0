"""Files of results, a line of JSON each: what a sweep that was cut has left, and what is written after that."""

from __future__ import annotations

from report import append_line, read_lines


def test_a_line_after_one_that_was_cut_off_is_a_line_of_its_own(tmp_path):
    file = tmp_path / "made" / "lines"
    append_line(file, {"run": 1})
    append_line(file, {"run": 2})
    file.write_bytes(file.read_bytes()[:-4])
    assert read_lines([file, tmp_path / "none"]) == [{"run": 1}]
    append_line(file, {"run": 3})
    append_line(file, {"run": 4})
    assert read_lines([file]) == [{"run": 1}, {"run": 3}, {"run": 4}]


def test_the_lines_of_files_follow_each_other(tmp_path):
    for number in (1, 2):
        append_line(tmp_path / str(number), {"run": number})
    assert read_lines([tmp_path / "2", tmp_path / "1"]) == [{"run": 2}, {"run": 1}]
