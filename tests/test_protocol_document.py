"""docs/protocol.md says what the code says: every message with its fields, every state, every move, every byte.

Rule 1: the page is parsed, not searched: a word in its prose does not count.  Rule 2: what is compared are sets, so
that a failure names what the page lacks and what it has too much.
"""

from __future__ import annotations

import importlib
import math
import re
import typing
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.state_drawing import draw_member, draw_peer
from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec, PeerId
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.members import ALLOWED, MemberState
from zmqtrain.protocol.messages import (
    ANNOUNCEMENTS,
    MESSAGES,
    Aggregate,
    Awaited,
    Books,
    Chunk,
    Credit,
    Done,
    Enrolled,
    Fetch,
    Forming,
    Goodbye,
    Group,
    GroupLost,
    Message,
    Placed,
    Preempt,
    Publish,
    ReduceChunk,
    ReducedChunk,
    Refused,
    Relay,
    Relayed,
    Replica,
    Roster,
    Scalar,
    Snapshot,
    Stop,
    Values,
    Welcome,
    WireLeaf,
    WirePlace,
    WireProcess,
    WireSchedule,
    WorkUnit,
)
from zmqtrain.protocol.peer import PEER_TRANSITIONS, Move, Peer, PeerState

PAGE = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text(encoding="utf-8")
KINDS = {kind.__name__: kind for kind in MESSAGES}
RULE_OF_TYPE: dict[Any, str] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    bytes: "bin",
    tuple[int, ...]: "ints",
    tuple[str, ...]: "strs",
    dict[str, Scalar]: "scalars",
    tuple[dict[str, Scalar], ...]: "rows",
    dict[str, float]: "scores",
    dict[str, str]: "names",
    dict[str, float] | None: "maybe-scores",
    tuple[WireLeaf, ...]: "model",
    tuple[WireProcess, ...]: "processes",
    tuple[WirePlace, ...]: "places",
    tuple[tuple[int, int], ...]: "landings",
    tuple[tuple[str, int], ...]: "origins",
    tuple[WireSchedule, ...]: "schedules",
}
FROM_HUB = {Welcome, Refused, Roster, Fetch, Snapshot, Aggregate, Chunk, Credit, Preempt, WorkUnit, Stop, Goodbye}
FROM_HUB |= {Forming, Group, GroupLost, Relay, Relayed, ReducedChunk}
FROM_HUB |= {Replica, Books}
FROM_HUB |= {Enrolled, Placed, Values, Done, Awaited}
MODEL = (LeafSpec("w", (4,), "float32"),)

each_kind = pytest.mark.parametrize("kind", MESSAGES, ids=list(KINDS))

# ---------------------------------------------------------------------- reading the page


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def tables(first_heading: str) -> list[list[dict[str, str]]]:
    """Return the tables whose first column has this heading, each row a map from heading to cell."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        if header[0] == first_heading:
            found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def grammar() -> dict[str, str]:
    """Return the ABNF rules of the page by name, comments taken out, continued lines joined."""
    rules: dict[str, str] = {}
    name = ""
    for line in "".join(blocks("abnf")).splitlines():
        line = re.sub(r"\s*;.*", "", line)
        if begins := re.match(r"([A-Za-z][A-Za-z0-9-]*)\s+=\s+(.*)", line):
            name = begins[1]
            assert name not in rules, f"docs/protocol.md defines {name} twice"
            rules[name] = begins[2]
        elif line.strip():
            rules[name] += " " + line.strip()
    return rules


GRAMMAR = grammar()


def drawn_moves() -> Iterator[tuple[str, str, str]]:
    """Give (state, label, state) of every arrow of the state drawing; one from a frame leaves every state inside it."""
    (drawing,) = [block for block in blocks("mermaid") if block.startswith("stateDiagram")]
    frames: dict[str, set[str]] = {}
    arrows = re.compile(r"\s*(\S+) --> (\S+)(?: : (.+))?")
    for name, body in re.findall(r'state "[^"]*" as (\w+) \{(.*?)\}', drawing, re.DOTALL):
        inside = [arrow.group(1, 2) for arrow in map(arrows.match, body.splitlines()) if arrow]
        frames[name] = {state for ends in inside for state in ends}
    for line in drawing.splitlines():
        if (arrow := arrows.match(line)) and "[*]" not in arrow.group(1, 2):
            for state in frames.get(arrow[1], {arrow[1]}):
                yield state, arrow[3], arrow[2]


def spoken() -> list[tuple[bool, bool, str, str]]:
    """Return (from the hub, on BULK, message, arguments) of every arrow of the conversations."""
    talks = [block for block in blocks("mermaid") if block.startswith("sequenceDiagram")]
    assert len(talks) == 6
    arrow = re.compile(r"^\s*(\w+)(-?->>)(\w+): (\w+)(?:\((.*)\))?$", re.MULTILINE)
    said = [match.groups(default="") for talk in talks for match in arrow.finditer(talk)]
    assert len(said) == sum(talk.count("->>") for talk in talks), "an arrow of a conversation cannot be read"
    assert all((sender == "H") != (receiver == "H") for sender, _, receiver, _, _ in said)
    return [(sender == "H", style == "-->>", name, arguments) for sender, style, _, name, arguments in said]


# ---------------------------------------------------------------------- frames


def test_the_limits_are_those_of_the_code() -> None:
    (limits,) = tables("limit")
    wrong = []
    for row in limits:
        module, _, name = row["limit"].strip("`").rpartition(".")
        actual = getattr(importlib.import_module(f"zmqtrain.{module}"), name)
        if float(row["value"].replace(",", "")) != actual:
            wrong.append(f"{name} is {actual}, the page says {row['value']}")
    assert limits and not wrong, "; ".join(wrong)


def test_the_example_of_a_head_is_what_is_sent() -> None:
    (example,) = blocks("hex")
    assert bytes.fromhex(example) == encode_message(Chunk(7, 300))


def test_a_payload_frame_can_be_read_by_the_table() -> None:
    (layout,) = [table for table in tables("offset") if table[0]["field"] == "version"]
    codec = codec_from_spec("int8")
    counts = (65_536, 101)
    (frame,) = encode_payload((codec, codec), [np.ones(count, np.float32) for count in counts])
    header = {
        row["field"]: int.from_bytes(frame[int(row["offset"]) :][: int(row["bytes"])], "little")
        for row in layout
        if row["bytes"].isdigit()
    }
    (end,) = [int(row["offset"]) for row in layout if row["field"] == "section"]
    for count in counts:
        sections, _ = codec.encode(np.ones(count, np.float32), codec.init(count))
        for section in sections:
            assert frame[end : end + section.nbytes] == section.tobytes()
            end += math.ceil(section.nbytes / 4) * 4
    assert end == len(frame)
    assert header == {
        "version": 2,
        "reserved": 0,
        "crc": zlib.crc32(f"{codec.name};{codec.name}".encode() + frame[:4] + frame[8:]),
        "first": 0,
        "slabs": len(counts),
    }


# ---------------------------------------------------------------------- messages


def test_the_grammar_has_every_message_and_no_other() -> None:
    assert GRAMMAR["kind"].split(" / ") == list(KINDS)
    assert {name for name in GRAMMAR if name[0].isupper()} == KINDS.keys()


@each_kind
def test_a_message_has_exactly_its_fields_in_its_line(kind: type[Message]) -> None:
    hints = typing.get_type_hints(kind)
    count = len(kind.__struct_fields__)
    wanted = [f'"{kind.__name__}"', f"%x{0x80 + count:X}" if count < 16 else f"%xDE.00.{count:02X}"]
    for field in kind.__struct_fields__:
        wanted += [f'"{field}"', RULE_OF_TYPE[hints[field]]]
    assert GRAMMAR.get(kind.__name__, "").split() == wanted


def test_every_rule_is_defined_and_used() -> None:
    rules = " ".join(re.sub(r'"[^"]*"|%x[0-9A-F.-]+', " ", rule) for rule in GRAMMAR.values())
    used = set(re.findall(r"(?<![A-Za-z0-9-])[A-Za-z][A-Za-z-]*", re.sub(r"\d+(?=[A-Za-z])", "", rules)))
    assert used | {"message"} == GRAMMAR.keys() | {"OCTET"}


def test_every_message_has_its_sentence_and_its_lane() -> None:
    said = dict(re.findall(r"^- \*\*(\w+)\*\* \(([^)]*)\): \S", PAGE, re.MULTILINE))
    assert said.keys() == KINDS.keys()
    assert {name for name, way in said.items() if "BULK" in way} == {
        "Snapshot",
        "Replica",
        "Aggregate",
        "Chunk",
        "Relay",
        "Values",
        "ReduceChunk",
        "ReducedChunk",
    }


# ---------------------------------------------------------------------- states


def test_the_drawing_has_every_transition_and_no_other() -> None:
    drawn = {(state, label, after) for state, label, after in drawn_moves() if label in KINDS}
    table = {(state.name, kind.__name__, after.name) for (state, kind), after in MOVES if isinstance(kind, type)}
    assert drawn == table


def test_every_state_of_a_node_is_named_and_drawn() -> None:
    nodes, _ = tables("state")
    assert {row["state"]: row["in words"] for row in nodes} == {state.name: state.value for state in PeerState}
    assert {state for before, _, after in drawn_moves() for state in (before, after)} == {s.name for s in PeerState}


MOVES = tuple(PEER_TRANSITIONS.items())
STIMULI: dict[str, Callable[[Peer], object]] = {
    "silence": lambda peer: peer.tick(100.0),
    "leave": lambda peer: peer.leave("enough"),
    "join": lambda peer: peer.join(MODEL, 1.0),
    "join a population": lambda peer: peer_of_a_population(peer).join(MODEL, 1.0),
    "resync": lambda peer: peer.resync(),
    "Welcome": lambda peer: peer.receive(Welcome("run", 3, RunSettings().to_dict()), 1.0),
    "Welcome of another run": lambda peer: peer.receive(Welcome("other", 3, RunSettings().to_dict()), 1.0),
    "Refused for good": lambda peer: peer.receive(Refused("protocol", "no"), 1.0),
    "Refused as unknown": lambda peer: peer.receive(Refused("unknown", "say Hello"), 1.0),
    "Refused, of a publish": lambda peer: peer.receive(Refused("codec", "no", 0), 1.0),
    "Goodbye": lambda peer: peer.receive(Goodbye(), 1.0),
    "Fetch": lambda peer: peer.receive(Fetch(), 1.0),
    "Snapshot": lambda peer: peer.receive(Snapshot(1, 3, (64,)), 1.0),
    "Aggregate": lambda peer: peer.receive(Aggregate(2, 0, "float32", (0,), (1,), (64,), (), 1), 1.0),
    "Aggregate after a gap": lambda peer: peer.receive(Aggregate(2, 9, "float32", (0,), (1,), (64,), (), 1), 1.0),
    "Preempt": lambda peer: peer.receive(Preempt("slow"), 1.0),
}


def peer_of_a_population(peer: Peer) -> Peer:
    peer.settings = RunSettings(initial="own")
    return peer


def peer_in(state: PeerState) -> Peer:
    """Return a node in this state, that has not joined with a model yet."""
    peer = Peer(PeerId("a#1"), "a")
    peer.run, peer.settings, peer._state = "run", RunSettings(), state
    return peer


def test_the_drawing_has_every_move_that_no_message_makes_and_no_other() -> None:
    table = {(state.name, after.name) for (state, cause), after in MOVES if isinstance(cause, Move)}
    drawn = {(state, after) for state, label, after in drawn_moves() if label not in KINDS}
    assert drawn == {(state, after) for state, after in table if state != after}


def test_whatever_happens_to_a_node_in_whatever_state_moves_it_as_the_table_says_and_nothing_else_can() -> None:
    made = set()
    for state in PeerState:
        for act in STIMULI.values():
            peer = peer_in(state)
            act(peer)
            made |= {(state, peer.state)} - {(state, state)}
        with pytest.raises(AttributeError):
            peer.state = PeerState.LIVE  # type: ignore[misc]
    by_table = {(state, after) for (state, _), after in MOVES if state is not after}
    assert made <= by_table
    # two take more than one stimulus: a mean that is lent and spoiled, and one of a population that is founded
    assert by_table - made == {(PeerState.FOUNDING, PeerState.SYNCING), (PeerState.APART, PeerState.SYNCING)}


def test_the_hubs_table_is_allowed_row_by_row() -> None:
    (table,) = [table for table in tables("message") if "OBSERVER" in table[0]]
    written = {row["message"]: {state for state, cell in row.items() if cell == "yes"} for row in table}
    assert written == {kind.__name__: {state.name for state in states} for kind, states in ALLOWED.items()}
    assert list(table[0]) == ["message", *(state.name for state in MemberState)]
    assert {cell for row in table for heading, cell in row.items() if heading != "message"} == {"yes", ""}


def test_every_state_at_the_hub_is_named() -> None:
    _, members = tables("state")
    assert {row["state"]: row["in words"] for row in members} == {state.name: state.value for state in MemberState}


# ---------------------------------------------------------------------- conversations


def test_who_speaks_in_a_conversation_may_say_that() -> None:
    for from_hub, bulk, name, _ in spoken():
        kind = KINDS[name]
        assert kind in (FROM_HUB if from_hub else ALLOWED.keys() | {Chunk, Credit}), f"{name}, from_hub={from_hub}"
        assert bulk == (kind in (Chunk, Relay, ReduceChunk, ReducedChunk) or (from_hub and kind in ANNOUNCEMENTS)), (
            f"{name} goes on the other lane"
        )


def test_what_is_said_in_a_conversation_has_fields_of_the_message() -> None:
    for _, _, name, arguments in spoken():
        given = re.findall(r"(\w+)(?:=(?:\"[^\"]*\"|\(\)|-?\d+))?(?:, |$)", arguments)
        unknown = set(given) - set(KINDS[name].__struct_fields__)
        assert not unknown, f"{name} has no {', '.join(sorted(unknown))}"
        assert arguments.count(", ") == len(given) - bool(given), f"{name}({arguments}) cannot be read"


def test_an_announcement_in_a_conversation_names_its_transfer() -> None:
    assert Publish in ANNOUNCEMENTS
    for _, _, name, arguments in spoken():
        if KINDS[name] in ANNOUNCEMENTS:
            assert arguments.startswith("transfer=") and "sizes" in arguments, f"{name}({arguments})"


def test_the_states_of_design_are_drawn_from_the_tables() -> None:
    page = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    assert draw_peer() in page and draw_member() in page
