"""What people see of a run: figures with units, one plain line or one table, and no control codes in a file."""

from __future__ import annotations

import io
import logging
import math
import threading
from pathlib import Path

import pytest

from tests.terminals import pseudo_terminal
from zmqtrain.cli import display as module
from zmqtrain.cli.display import (
    Display,
    RosterTable,
    Terminal,
    format_bytes,
    format_count,
    format_number,
    format_scores,
    format_seconds,
    log_to_stderr,
    roster_headline,
    roster_legend,
    roster_line,
)
from zmqtrain.protocol.messages import Roster


def member(name: str, **figures: object) -> dict:
    return {
        "peer": f"{name}#1", "name": name, "state": "live", "contributions": 4, "staleness": 1, "refused": 0,
    } | figures  # fmt: skip


TRAINING = member(
    "pc-1", step=128, samples=4096, samples_per_second=3400.0, loss=2.25, age_steps=5.0, bytes_sent=1_234_567,
    bytes_received=999, waiting="",
)  # fmt: skip
NEW = member("pc-2", state="welcomed")


def roster(*members: dict, **figures: object) -> Roster:
    facts = {
        "version": 12, "members": members, "evaluator": "pc-1#1", "samples": 48_100, "contributions": 30,
        "units_done": 3, "units_total": 40, "seconds": 75.4, "scores": {"loss": 2.3456, "bits_per_byte": 3.384},
        "score_version": 11,
    }  # fmt: skip
    return Roster(**(facts | figures))


class Told:
    """A source that has this roster."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1_234_567, "1.2 MB"), (99_960, "100 kB"), (999_600, "1.0 MB"), (4e15, "4000 TB")],
)
def test_bytes_are_shown_in_powers_of_1000(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_figures_are_shown_in_a_persons_units() -> None:
    assert [format_count(value) for value in (7, 3400, 1_500_000)] == ["7", "3.4 k", "1.5 M"]
    assert [format_seconds(value) for value in (-1.0, 9.9, 75.4, 3700.0)] == ["0:00", "0:09", "1:15", "1:01:40"]
    assert format_scores({"bits_per_byte": 3.384}) == "bits per byte 3.3840"
    assert format_scores({"loss": 0.06, "accuracy": 98.14}) == "loss 0.0600, accuracy 98.1 %"
    assert format_scores({"accuracy": 98.14, "loss": 0.06}) == "loss 0.0600, accuracy 98.1 %", (
        "as a checkpoint has them"
    )
    assert format_scores({"accuracy": 0.981, "top_5_accuracy": 100.0}) == "accuracy 0.9810, top 5 accuracy 100.0 %"


def test_what_is_not_known_is_a_dash() -> None:
    assert format_number(math.nan) == format_bytes(math.nan) == format_count(math.inf) == "–"


def test_k_and_d_and_the_rates_of_links_are_shown_where_they_are_known() -> None:
    known = roster(TRAINING | {"link_rate": 119.5e6, "share": 0.8}, NEW, every=12, delay=5)
    assert " · k 12, d 5 · " in roster_headline(known)
    assert "956 Mb/s" in render(RosterTable(known), 100)
    assert "link" not in render(RosterTable(roster(TRAINING, NEW)), 100)


def test_the_headline_says_how_the_run_stands() -> None:
    text = roster_headline(roster(TRAINING, NEW))
    expected = "1:15 · version 12 · 2 nodes · 48.1 k samples · 3/40 units (7 %, about 2:54 left)"
    assert (
        text == f"{expected} · held-out loss 2.3456, bits per byte 3.3840 · what another PC would add is not known yet"
    )


def test_of_pipelines_the_headline_counts_whole_ones() -> None:
    hub = {"gain_next": 0.2, "gain_last": 0.3, "pipelines": 2}
    members = [member(f"pc-{number}") | {"pipeline": "3f2a", "parts": "0 to 3 of 8"} for number in range(4)]
    shown = roster(*members, hub=hub)
    assert "would add" not in roster_headline(roster(*members, hub=hub | {"pipelines": 0}))
    assert roster_headline(shown).endswith("a third pipeline would add about 20 %; the second adds 30 %")
    assert "pipeline 3f2a, parts 0 to 3 of 8" in roster_line(shown)


@pytest.mark.parametrize(
    ("nodes", "gains", "text"),
    [
        (4, (0.118, 0.18), "a fifth PC would add about 12 %; the fourth adds 18 %"),
        (1, (0.9, math.inf), "a second PC would add about 90 %"),
        (7, (0.004, 0.06), "an eighth PC would add less than 1 %; the seventh adds 6 %"),
        (10, (0.05, 0.07), "an 11th PC would add about 5 %; the tenth adds 7 %"),
        (21, (0.02, 0.02), "a 22nd PC would add about 2 %; the 21st adds 2 %"),
        (2, (math.nan, 1e300), "what another PC would add is not known yet"),
    ],
)
def test_the_headline_says_what_another_pc_would_add(nodes: int, gains: tuple[float, float], text: str) -> None:
    hub = {"noise": 9.0, "gain_next": gains[0], "gain_last": gains[1]}
    members = [member(f"pc-{number}") for number in range(nodes)]
    assert roster_headline(roster(*members, hub=hub)).endswith(f" · {text}")
    known = roster_headline(roster(*members, hub=hub | {"rho": 0.1}))
    assert known.endswith("(correlation of deltas 0.10)") == math.isfinite(gains[0])


def test_what_another_pc_would_add_is_not_said_where_no_deltas_of_several_are_shared() -> None:
    for facts in ({"exchange": "allreduce"}, {"version": -1}):
        assert "another PC" not in roster_headline(roster(TRAINING, NEW, **facts))
    assert "another PC" not in roster_headline(roster(TRAINING))


@pytest.mark.parametrize(
    ("done", "text"), [(0, "0/40 units ·"), (40, "40/40 units (100 %) ·"), (39, "(97 %, about 0:0")]
)
def test_the_share_of_the_units_and_the_time_left_are_said_once_something_is_done(done: int, text: str) -> None:
    assert text in roster_headline(roster(TRAINING, units_done=done))


def test_nodes_of_one_name_are_told_apart_and_others_keep_theirs() -> None:
    twins = [TRAINING | {"peer": "vm#4", "name": "vm"}, TRAINING | {"peer": "vm#7", "name": "vm", "waiting": "data"}]
    several = roster(*twins, NEW)
    shown = render(RosterTable(several), 100)
    assert "vm#4" in shown and "vm#7" in shown and "pc-2#" not in shown
    assert "vm#7 waits for data" in roster_line(several)
    long = [TRAINING | {"peer": f"{'x' * 40}#{number}", "name": "x" * 40} for number in (1, 12)]
    assert f"{'x' * 20}…#12" in render(RosterTable(roster(*long)), 100)


def test_the_legend_explains_what_is_shown_and_nothing_else() -> None:
    legend = roster_legend(roster(TRAINING))
    assert "age: steps" in legend and "link" not in legend and "*" not in legend and "k:" not in legend
    legend = roster_legend(roster(TRAINING | {"link_rate": 1.0}, NEW, every=2, delay=1))
    assert "link: rate" in legend and "*: scores" in legend and "k: steps between" in legend


def test_what_makes_the_last_report_old_is_shown_in_place_of_it() -> None:
    stream, shown = io.StringIO(), threading.Event()

    class Noted(Display):
        def note(self) -> str:
            shown.set()
            return "pc has had no hub for 0:05"

    with Noted(Told(roster(TRAINING)), "a run", stream=stream, plain_seconds=0.0):
        assert shown.wait(60)
    assert set(stream.getvalue().splitlines()) == {"pc has had no hub for 0:05"}
    with pseudo_terminal() as terminal, open(terminal.child, "w", closefd=False) as child:
        with Noted(Told(roster(TRAINING)), "a run", stream=child):
            pass
        child.flush()
        said = terminal.end()
    assert "pc has had no hub" in said and "the hub's last report" in said


def test_where_gradients_are_exchanged_in_every_step_the_headline_says_how_and_not_k_and_d() -> None:
    text = roster_headline(roster(every=8, delay=4, samples=0, exchange="allreduce:algorithm=ring,size=0,overlap=none"))
    assert " · exchange allreduce:algorithm=ring · " in text
    assert "k 8" not in text and "samples" not in text


def test_the_headline_says_that_an_operator_ends_the_run() -> None:
    assert " · an operator ends the run: nodes send what they have computed" in roster_headline(
        roster(hub={"ending": True})
    )
    assert "operator" not in roster_headline(roster())


def test_the_headline_says_what_a_parameter_server_serves() -> None:
    served = {"keys": 12, "bytes": 3_200_000, "pushes": 4500, "clients": 3}
    assert " · serves 12 keys, 3.2 MB: 4.5 k pushes, 3 clients now" in roster_headline(roster(served=served))


def test_the_headline_says_where_the_standby_is_and_what_was_not_believed() -> None:
    headline = roster_headline(roster(hub={"term": 1, "standby": "tcp://pc2:5555", "former": 2, "double": 1}))
    assert "3 stale or double messages dropped" in headline
    assert "term 1 · standby tcp://pc2:5555" in headline
    assert "term" not in roster_headline(roster(hub={"term": 0, "standby": ""}))


def test_the_headline_says_what_the_broker_refuses_and_that_its_disk_is_full() -> None:
    hub = {"refused": 3, "turned_away": 1200, "waits_for_room": True}
    headline = roster_headline(roster(member("pc-1", state="quarantined"), hub=hub))
    refusals = " · 1 quarantined · 3 deltas refused · 1.2 k turned away at its port in the last minute · "
    assert refusals + "the broker's disk is full" in headline
    calm = roster_headline(roster(hub={"refused": 0, "turned_away": 0, "waits_for_room": False}))
    assert "quarantined" not in calm and "refused" not in calm and "turned away" not in calm and "disk" not in calm


def test_before_anybody_founds_the_run_the_headline_says_what_is_awaited() -> None:
    assert "waiting for the first node" in roster_headline(roster(version=-1, units_total=0, scores={}))


def test_the_plain_line_sums_over_the_members_and_says_who_waits() -> None:
    waiting = member("pc-3", loss=2.75, samples_per_second=600.0, bytes_sent=1, bytes_received=1, waiting="data units")
    line = roster_line(roster(TRAINING, NEW, waiting))
    assert "4 k/s · loss 2.500 · up 1.2 MB, down 1.0 kB · pc-3 waits for data units" in line.replace("4.0", "4")


def render(table: object, width: int) -> str:
    console = Terminal(io.StringIO())
    console.print(table, width=width)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_a_row_for_each_member_and_marks_the_one_that_scores() -> None:
    lines = render(RosterTable(roster(TRAINING, NEW)), 100).splitlines()
    assert lines[0].split() == ["node", "step", "samples/s", "loss", "age", "stale", "up", "down"]
    assert lines[1].split() == ["pc-1", "*", "128", "3.4", "k", "2.250", "5", "1", "1.2", "MB", "999", "B"]
    assert lines[2].split() == ["pc-2", "–", "–", "–", "–", "1", "–", "–", "welcomed"]


def test_the_table_fits_a_terminal_of_80_columns_with_a_node_that_waits() -> None:
    waiting = TRAINING | {"waiting": "the nodes that the run starts with"}
    assert all(len(line) <= 80 for line in render(RosterTable(roster(waiting)), 80).splitlines())


def test_a_long_name_is_cut_short_so_that_no_figure_is_on_80_columns() -> None:
    long = TRAINING | {"name": "the-pc-by-the-window-of-room-12-whose-fan-is-loud", "step": 123_456}
    lines = render(RosterTable(roster(long, NEW)), 80).splitlines()
    assert lines[1].split()[0] == "the-pc-by-the-window-of…"
    assert lines[1].split()[1:] == ["*", "123456", "3.4", "k", "2.250", "5", "1", "1.2", "MB", "999", "B"]


class Stream(io.StringIO):
    """A stream that says when each of these lines has been written."""

    def __init__(self, *lines: str) -> None:
        super().__init__()
        self.lines, self.full = lines, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if all(f"{line}\n" in self.getvalue() for line in self.lines):
            self.full.set()
        return written


def test_where_there_is_no_terminal_plain_lines_are_written_and_no_control_codes() -> None:
    stream = Stream("stopping", roster_line(roster(TRAINING)))
    with Display(Told(roster(TRAINING)), "a run", stream=stream, plain_seconds=0.0) as display:
        display.say("stopping")
        assert stream.full.wait(60.0)
    assert "\x1b" not in stream.getvalue()


def test_a_display_that_was_never_started_may_be_closed_and_one_may_be_closed_twice() -> None:
    stream = io.StringIO()
    display = Display(Told(roster(TRAINING)), "a run", stream=stream, plain_seconds=math.inf)
    display.close()
    assert stream.getvalue() == ""
    display.start()
    display.close()
    display.close()
    assert stream.getvalue() == roster_line(roster(TRAINING)) + "\n"


NAMES = (
    "x[/red]y",
    "[bold]b",
    "a\x1b[2Jb\x1b]0;title\x07",
    "n" * 10_000,
    ":smile:",
    "two\nlines\r",
    "\u202eright",
    "[",
    "",
)


def test_on_a_terminal_any_name_is_shown_as_it_is_written_and_moves_no_cursor(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    members = tuple(member(name, waiting="for [/] \x1b[31m" * 1000) for name in NAMES)
    with pseudo_terminal() as terminal, open(terminal.child, "w", closefd=False) as stream:
        display = Display(Told(roster(*members)), "at [/red] \x1b[2J", stream=stream)
        with display:
            display.say("it says [/red] \x1b[2J")
        stream.flush()
        shown = terminal.end()
    for text in (
        "x[/red]y",
        "[bold]b",
        "a?[2Jb",
        "n" * 23 + "…",
        ":smile:",
        "?right",
        "it says [/red] ?[2J",
        "at [/red] ?[2J",
    ):
        assert text in shown
    assert "\x1b[2J" not in shown and "\x1b]0" not in shown and "n" * 24 not in shown


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 2**63, "a text", "\x1b[2J", True])
def test_any_figure_that_a_hub_sends_can_be_shown(value) -> None:
    figures = dict.fromkeys(
        ("step", "samples_per_second", "loss", "age_steps", "bytes_sent", "bytes_received", "staleness", "link_rate"),
        value,
    )
    counts = dict.fromkeys(("term", "refused", "turned_away", "former", "standby", "waits_for_room"), value)
    served = dict.fromkeys(("keys", "bytes", "pushes", "clients"), value)
    number = value if isinstance(value, float) else 0.0
    odd = roster(
        TRAINING | figures, {"loss": value}, {}, hub=counts, served=served, seconds=number, scores={"loss": number}
    )
    shown = roster_line(odd) + render(RosterTable(odd), 100)
    assert "\x1b" not in shown and all(len(line) < 700 for line in shown.splitlines())


def test_a_log_line_holds_no_escape_code(capsys) -> None:
    log_to_stderr(False)
    logging.getLogger("zmqtrain.test").warning("%s left", "x[/red]\x1b[2Jy")
    assert capsys.readouterr().err.endswith(" x[/red]?[2Jy left\n")


def test_every_command_shows_its_text_on_the_terminal_that_reads_no_markup() -> None:
    others = [path for path in Path(module.__file__).parent.glob("*.py") if path.name != "display.py"]
    assert others and not [path.name for path in others if "rich.console import Console" in path.read_text()]


def wide(table: object) -> str:
    console = Terminal(io.StringIO())
    console.width = 140
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_device_of_each_node_is_shown_without_its_maker_once_one_is_known() -> None:
    known = RosterTable(roster(TRAINING | {"device": "NVIDIA GeForce RTX 3060"}, NEW, member("pc-3", device="cpu")))
    lines = wide(known).splitlines()
    assert "device" in lines[0] and "RTX 3060" in lines[1] and "NVIDIA" not in lines[1] and "cpu" in lines[3]
    assert len(lines) == 4
    assert render(known, 80).splitlines()[-1].strip() == "RTX 3060: pc-1  cpu: pc-3"
    unknown = RosterTable(roster(TRAINING, NEW))
    assert "device" not in wide(unknown) and len(render(unknown, 80).splitlines()) == 3


def test_a_device_is_its_nodes_words_and_cannot_move_the_cursor() -> None:
    shown = RosterTable(roster(TRAINING | {"device": "[red]x\x1b[2J" + "y" * 500}))
    for text in (render(shown, 80), wide(shown)):
        assert "\x1b" not in text and "[red]x?[2Jyyy" in text and "y" * 30 not in text


def test_on_80_columns_no_figure_is_cut_by_a_device() -> None:
    known = TRAINING | {"device": "NVIDIA GeForce RTX 4070 Ti SUPER", "link_rate": 119.5e6}
    shown = render(RosterTable(roster(known)), 80)
    for figure in ("128", "3.4 k", "2.250", "1.2 MB", "999 B", "956 Mb/s", "RTX 4070 Ti SUPER: pc-1"):
        assert figure in shown


def test_on_80_columns_with_links_a_long_name_cuts_no_figure_and_what_is_said_of_a_node_stands_below() -> None:
    figures = {"link_rate": 119.5e6, "step": 123_456, "bytes_sent": 123_400_000, "bytes_received": 999_000_000}
    long = TRAINING | figures | {"name": "the-pc-by-the-window-of-room-12", "state": "quarantined"}
    lines = render(RosterTable(roster(TRAINING | figures, long)), 80).splitlines()
    shown = "* 123456 3.4 k 2.250 5 1 123 MB 999 MB 956 Mb/s"
    assert [" ".join(line.split()) for line in lines[1:3]] == [f"pc-1 {shown}", f"the-pc-by-th… {shown}"]
    assert [line.strip() for line in lines[3:]] == ["the-pc-by-the-window-of…: quarantined"]


def test_the_same_batches_and_a_loop_without_units_are_said_of_the_node() -> None:
    remarks = TRAINING | {"same_batches_as": "pc-2#1", "takes_no_units": True}
    shown = " ".join(wide(RosterTable(roster(remarks, NEW))).split())
    assert "trains on the same batches as pc-2;" in shown and "takes no data units" in shown
    line = roster_line(roster(remarks, NEW))
    assert line.endswith("pc-1 trains on the same batches as pc-2; takes no data units")


def test_offers_that_are_put_off_are_in_the_headline_with_the_k_and_d_that_would_fit() -> None:
    told = {"put_off": 0.274, "fitting_every": 6, "fitting_delay": 14}
    text = roster_headline(roster(TRAINING, hub=told))
    assert "27 % of the offers put off" in text and "--every 6 and --delay 14 would fit, or auto" in text
    planned = roster_headline(roster(TRAINING, hub={"put_off": 0.274}))
    assert "27 % of the offers put off" in planned and "would fit" not in planned
    assert "put off" not in roster_headline(roster(TRAINING))


def test_an_evaluation_far_worse_than_the_best_is_in_the_headline() -> None:
    hub = {"best_loss": 2.31, "best_version": 40}
    text = roster_headline(roster(TRAINING, scores={"loss": 489.2}, hub=hub))
    assert "held-out loss 489.2000 (212 times the best, 2.3100 at version 40: is the learning rate too high?)" in text
    assert "times the best" not in roster_headline(roster(TRAINING))
