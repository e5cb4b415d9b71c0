"""The model of a run as one file: `zmqtrain export SOURCE`, and `zmqtrain merge FOLDER...`.

Rule 1: the run does not change: an export is an observer, no round waits for it, and a folder is only read.
Rule 2: of a running run it gets the published parameters; of a folder those of the newest version, or the broker's own
model file where that is of the same version (it may hold the best version instead).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from numpy.typing import NDArray

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import decode_snapshot
from zmqtrain.averaging.snapshot import split_snapshot
from zmqtrain.broker.checkpoint import MODEL_FILE, RunFolder, join_parts, merge_parts, model_arrays, part_file
from zmqtrain.checkpoint.model_files import ModelFacts, facts_from_state, read_model, write_model
from zmqtrain.cli.display import log_to_stderr
from zmqtrain.cli.settings import HubOptions, LogOptions, check_host, check_new_file, command
from zmqtrain.codecs.fragment import layout_of
from zmqtrain.core.errors import CheckpointError, ConfigError, ZmqTrainError
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect
from zmqtrain.node.node import Node
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.transport.address import parse_addresses
from zmqtrain.transport.key_folder import Access, find_access
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey

COPY_SECONDS = 600.0
"""So long a copy may take to come."""

Model = tuple[dict[str, NDArray[Any]], ModelFacts]


def model_of_run(
    address: str, server_key: GivenServerKey = None, keys: GivenKeys = None, timeout_seconds: float = 10.0
) -> Model:
    """Return the parameters of the run at `address` by leaf path, as its nodes have them, and their facts.

    Of several brokers the first's address is enough; each sends its part, of a version of its own.
    Raises ConfigError where the run has none yet, HubUnreachable, JoinRefused.
    """
    access = find_access(address, server_key, keys)
    with _look_on(address, access, timeout_seconds) as node:
        facts, part = _part(node)
        shards, parts = node.settings.shards, [part]
        if shards == 1:
            return part, facts
        for shard, other in enumerate(node.shards[1:], 1):
            if not other:
                raise ZmqTrainError(
                    f"the broker of shard {shard} of {shards} is not there, and has a part of the model"
                )
            with _look_on(other, access, timeout_seconds) as line:
                of_shard, part = _part(line)
                parts.append(part)
                facts = min(facts, of_shard, key=lambda one: one.version)
    return join_parts(facts.leaves, parts), facts


def _look_on(address: str, access: Access, timeout_seconds: float) -> Node:
    node = connect(address, "export", keys=access, observer=True, timeout_seconds=timeout_seconds, codec_on="host")
    assert isinstance(node, Node), "who looks on has one line"
    return node


def _part(node: Node) -> tuple[ModelFacts, dict[str, NDArray[Any]]]:
    """Return the facts of what one broker has of the model, and that, flat where it is not a whole leaf."""
    settings, model = node.settings, node.peer.run_model
    snapshot, frames = node.fetch_copy(COPY_SECONDS)
    layout = layout_of(model, settings, node.shard)
    leaves = layout.join(decode_snapshot(layout, split_snapshot(snapshot, frames)[0]))
    roster = node.roster
    facts = ModelFacts(
        run=node.run,
        version=snapshot.version,
        newest=snapshot.version,
        samples=0 if roster is None else roster.samples,
        program=settings.program,
        program_arguments=settings.program_arguments,
        evaluation={} if roster is None else dict(roster.scores),
        evaluation_version=-1 if roster is None else roster.score_version,
        leaves=model,
    )
    return facts, {leaf.path: values for leaf, values in zip(model, leaves, strict=True)}


def model_of_folder(folder: Path) -> Model:
    """Return the parameters of the newest version in a broker's folder (or that of `zmqtrain local`), and their facts.

    A broker may be using the folder. Raises CheckpointError.
    """
    inside = folder / "broker"
    if inside.is_dir():
        return model_of_folder(inside)
    if any(folder.glob("shard-*")) or any(folder.glob(part_file("*", "*"))):
        raise CheckpointError(
            f"{folder} holds the parts of a model that several brokers have: `zmqtrain merge` makes one of them, once "
            "each broker has ended"
        )
    run, file = RunFolder(folder), folder / MODEL_FILE
    if (loaded := run.load()) is None:
        if file.exists():
            return read_model(file)
        raise CheckpointError(f"there is no run in {folder}: name the --checkpoint folder of a broker, or its address")
    state, arrays = loaded
    if not isinstance(state.get("settings"), dict) or "run" not in state:
        raise CheckpointError(f"the checkpoint in {folder} is not of a broker's run: it is of a node, perhaps")
    settings = RunSettings.from_dict(state["settings"])
    hub, aggregator = Hub(settings, release_rule_from_spec(settings.release), str(state["run"])), Aggregator(settings)
    run.resume(state, arrays, hub, aggregator)
    facts = facts_from_state(hub.state())
    if file.exists():
        written, said = read_model(file)
        if said.run == facts.run and said.newest == facts.version:
            return written, said
    return model_arrays(aggregator.arrays()), facts


@dataclass(frozen=True, kw_only=True)
class ExportConfig(HubOptions):
    """Take the model out of a run that runs, by its broker's address, or out of one that has ended, by its folder.

    The run goes on as it was. In Python, zmqtrain.load_model(FILE, like=params) puts the model into a tree.

    Example: zmqtrain export tcp://192.168.1.10:5555 --out model.safetensors
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HUB|FOLDER")]
    """The broker's address (tcp://HOST:PORT), or the folder in which a broker has saved its run."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("model.safetensors")
    """Where to write the model: safetensors, with the leaf paths as names."""
    wait_seconds: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_new_file(self.out)
        if self.of_a_hub:
            parse_addresses(self.source)
        elif not Path(self.source).exists():
            raise ConfigError(
                f"there is no folder {self.source}; a broker's address is written like tcp://192.168.1.10:5555"
            )

    @property
    def of_a_hub(self) -> bool:
        return "://" in self.source


def _export(config: ExportConfig) -> int:
    log_to_stderr(False)
    if config.of_a_hub:
        check_host(config.source)
        arrays, facts = model_of_run(config.source, config.server_key, config.keys, config.wait_seconds)
    else:
        place = Path(config.source)
        arrays, facts = read_model(place) if place.is_file() else model_of_folder(place)
    write_model(config.out, arrays, facts)
    print(f"{config.out}: {facts.description}; {sum(array.size for array in arrays.values()):,} values")
    return 0


main = command(ExportConfig, "zmqtrain export", _export)


@dataclass(frozen=True, kw_only=True)
class MergeConfig(LogOptions):
    """Make one file of the parts of a model that several brokers have written.

    Each wrote its part to its --checkpoint folder when it ended; give all these folders, or the files
    (model-I-of-M.safetensors), in any order.

    Example: zmqtrain merge first/ second/ --out model.safetensors
    """

    parts: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]
    """The folders, or files."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("model.safetensors")
    """Where to write the model: safetensors, with the leaf paths as names."""

    def __post_init__(self) -> None:
        check_new_file(self.out)


def _merge(config: MergeConfig) -> int:
    log_to_stderr(config.verbose)
    values = merge_parts(config.parts, config.out)
    print(f"{config.out}: {values:,} values of {len(config.parts)} parts")
    return 0


merge_main = command(MergeConfig, "zmqtrain merge", _merge)
