"""Read a scenario from a TOML file: [run] the run's settings, [link] the wires, one [[node]] per kind of node.

    max_seconds = 60            # and the other fields of `Scenario`
    [hub_link]                  # of the hub's port, where it is another
    bits_per_second = 2.5e9
    [run]
    program = "text"            # the fields of `RunSettings`; program_arguments may be a table
    [[node]]
    count = 3                   # so many of these; the fields of `SimNode`
    step_seconds = 0.05
    [[fault]]                   # any number of these; the fields of `Fault`
    at = 3
    kind = "stop"
    target = "node-1"
    seconds = 10
    [chaos]                     # or a schedule that is drawn: arguments of `draw_schedule`
    seed = 3
    seconds = 60
    kinds = ["kill", "drop", "duplicate"]

or, for pipelines, which train nothing and have no hub:

    seed = 3
    [link]
    [[pipeline]]                # any number of these; the fields of `SimPipeline`
    stages = 4

Rule: what cannot be used is a ConfigError that says where it stands, and what was probably meant.
"""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from zmqtrain.chaos.schedule import Fault, check_kinds, draw_schedule
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.sim.pipeline import PipelineScenario, SimPipeline
from zmqtrain.sim.scenario import SIM_KINDS, Scenario, SimNode
from zmqtrain.transport.memory import LinkModel

NOT_OWN = ("settings", "nodes", "link", "hub_link", "faults")
MOST_SECONDS, MOST_NODES = 10**9, 10**5
TABLES = ("run", "link", "hub_link", "node", "fault", "chaos")


def read_scenario(path: Path, seed: int | None = None) -> Scenario | PipelineScenario:
    """Return the scenario that a TOML file describes. seed: instead of the file's. Raises ConfigError."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the scenario {path} cannot be read: {why}") from error
    except RecursionError as error:
        raise ConfigError(
            f"the scenario {path} is nested too deeply: its tables hold numbers, texts and lists"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    if "pipeline" in tables:
        pipelines = pipelines_from_tables(tables, str(path))
        return pipelines if seed is None else replace(pipelines, seed=seed)
    scenario = scenario_from_tables(tables, str(path))
    return scenario if seed is None else replace(scenario, settings=replace(scenario.settings, seed=seed))


def scenario_from_tables(tables: Mapping[str, Any], place: str) -> Scenario:
    """Return the scenario that the tables of a TOML file describe. place: for messages. Raises ConfigError."""
    own = [field.name for field in fields(Scenario) if field.name not in NOT_OWN]
    _check_keys(place, tables, (*own, *TABLES))
    settings = _settings(f"{place} [run]", _table(place, tables, "run"))
    link = _record(LinkModel, f"{place} [link]", _table(place, tables, "link"))
    of_hub = _table(place, tables, "hub_link")
    hub_link = _record(LinkModel, f"{place} [hub_link]", of_hub) if of_hub else None
    nodes = tables.get("node", [])
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        raise ConfigError(f"{place}: a scenario has at least one [[node]] (with two brackets)")
    values = {name: _value(f"{place}: {name}", Scenario, name, tables[name]) for name in own if name in tables}
    every = [one for number, node in enumerate(nodes, start=1) for one in _nodes(f"{place} [[node]] {number}", node)]
    named = tuple(replace(one, name=one.name or f"node-{number}") for number, one in enumerate(every))
    try:
        faults = _faults(place, tables, [one.name for one in named])
        return Scenario(settings=settings, nodes=named, link=link, hub_link=hub_link, faults=faults, **values)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def pipelines_from_tables(tables: Mapping[str, Any], place: str) -> PipelineScenario:
    """Return the pipelines that the tables of a TOML file describe. place: for messages. Raises ConfigError."""
    _check_keys(place, tables, ("pipeline", "link", "seed"))
    pipelines = tables["pipeline"]
    if not isinstance(pipelines, list) or not pipelines or not all(isinstance(one, dict) for one in pipelines):
        raise ConfigError(f"{place}: a pipeline is a table [[pipeline]] (with two brackets)")
    link = _record(LinkModel, f"{place} [link]", _table(place, tables, "link"))
    every = tuple(
        _record(SimPipeline, f"{place} [[pipeline]] {number}", one) for number, one in enumerate(pipelines, start=1)
    )
    seed = tables.get("seed", 0)
    if type(seed) is not int:
        raise ConfigError(f"{place}: seed must be a whole number, got {reprlib.repr(seed)}")
    return PipelineScenario(pipelines=every, link=link, seed=seed)


def _faults(place: str, tables: Mapping[str, Any], names: list[str]) -> tuple[Fault, ...]:
    """The faults that are written, and those that are drawn."""
    written = tables.get("fault", [])
    if not isinstance(written, list) or not all(isinstance(one, dict) for one in written):
        raise ConfigError(f"{place}: a fault is a table [[fault]] (with two brackets)")
    faults = []
    for number, one in enumerate(written, start=1):
        where = f"{place} [[fault]] {number}"
        _check_keys(where, one, [field.name for field in fields(Fault)])
        if missing := [name for name in ("at", "kind", "target") if name not in one]:
            raise ConfigError(f"{where} says no {missing[0]}")
        check_kinds([str(one["kind"])])
        numbers = {name: _number(f"{where}: {name}", one.get(name, 0.0)) for name in ("at", "seconds", "severity")}
        faults.append(Fault(kind=one["kind"], target=str(one["target"]), **numbers))
    drawn = _table(place, tables, "chaos")
    if drawn:
        where = f"{place} [chaos]"
        _check_keys(where, drawn, ("seed", "seconds", "kinds", "mean_seconds"))
        kinds = check_kinds([str(kind) for kind in drawn.get("kinds", SIM_KINDS)])
        seed = drawn.get("seed", 0)
        if type(seed) is not int:
            raise ConfigError(f"{where}: seed must be a whole number, got {seed!r}")
        seconds = _number(f"{where}: seconds", drawn.get("seconds", 60.0))
        mean_seconds = _number(f"{where}: mean_seconds", drawn.get("mean_seconds", 10.0))
        faults += draw_schedule(seed, seconds, names, kinds, mean_seconds=mean_seconds)
    return tuple(sorted(faults))


def _number(place: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS:
        raise ConfigError(
            f"{place} must be a number of at least 0 and at most {MOST_SECONDS:,}, got {reprlib.repr(value)}"
        )
    return float(value)


def _settings(place: str, table: Mapping[str, Any]) -> RunSettings:
    _check_keys(place, table, [field.name for field in fields(RunSettings)])
    values = dict(table)
    if isinstance(arguments := values.get("program_arguments"), dict):
        values["program_arguments"] = ",".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in arguments.items()
        )
    try:
        return RunSettings.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _nodes(place: str, table: Mapping[str, Any]) -> list[SimNode]:
    """The nodes that one table describes: `count` of them; with a name, they are numbered if they are several."""
    _check_keys(place, table, ("count", *(field.name for field in fields(SimNode))))
    count = table.get("count", 1)
    if type(count) is not int or not 1 <= count <= MOST_NODES:
        raise ConfigError(f"{place}: count must be a whole number of 1 to {MOST_NODES:,}, got {count!r}")
    node = _record(SimNode, place, {name: value for name, value in table.items() if name != "count"})
    if count == 1 or not node.name:
        return [node] * count
    return [replace(node, name=f"{node.name}-{number}") for number in range(count)]


def _record(kind: Any, place: str, table: Mapping[str, Any]) -> Any:
    _check_keys(place, table, [field.name for field in fields(kind)])
    try:
        return kind(**{name: _value(f"{place}: {name}", kind, name, value) for name, value in table.items()})
    except ConfigError as error:
        raise error if str(error).startswith(place) else ConfigError(f"{place}: {error}") from error


def _value(place: str, kind: Any, name: str, value: Any) -> Any:
    """Return a value in the type of the field's default: numbers as numbers, lists as tuples of numbers."""
    (default,) = (field.default for field in fields(kind) if field.name == name)
    if isinstance(default, tuple) and name == "slowness":
        return tuple(_number(place, number) for number in (value if isinstance(value, list) else [value]))
    if isinstance(default, tuple) and not (name == "straggler" and isinstance(value, str)):
        try:
            return tuple(tuple(float(number) for number in part) for part in value)
        except (TypeError, ValueError):
            raise ConfigError(f"{place} must be a list of lists of numbers, got {reprlib.repr(value)}") from None
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default) and name != "straggler":
        word = {int: "a whole number", float: "a number", bool: "true or false"}.get(type(default), "a text")
        raise ConfigError(f"{place} must be {word}, got {reprlib.repr(value)}")
    return value


def _table(place: str, tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: {name} is a table: [{name}]")
    return table


def _check_keys(place: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    names = list(known)
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
            raise ConfigError(f"{place}: there is no {key!r}; {hint}")
