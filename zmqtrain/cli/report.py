"""Write the report of a run, or of several beside each other: `zmqtrain report RECORDS...`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zmqtrain.cli.display import log_to_stderr, say
from zmqtrain.cli.settings import LogOptions, command
from zmqtrain.core.errors import ConfigError

PROGRAM = "zmqtrain report"


@dataclass(frozen=True, kw_only=True)
class ReportConfig(LogOptions):
    """Write a report of the runs in RECORDS: one HTML file with pictures and tables, which opens without a network.

    RECORDS are folders of records, or files: those that --record of the broker and of nodes has written, those of
    zmqtrain sim --json, or the lines of zmqtrain status --watch --json. Files of one run belong together; several runs
    stand beside each other. A run that still goes on, or was cut off, is told as far as its records go.

    Example: zmqtrain report broker.jsonl pc1.jsonl pc2.jsonl -o report.html
    """

    records: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RECORDS...")] = ()
    """Folders of records, or files."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE", aliases=["-o"])] = Path("report.html")
    """The file to write; an older one is replaced."""
    title: str = ""
    """What stands above the report; empty: the names of the runs."""

    def __post_init__(self) -> None:
        if not self.records:
            raise ConfigError(
                "say which records: zmqtrain report FOLDER, or the files that --record of the broker and of nodes has "
                "written"
            )
        if self.output.is_dir():
            raise ConfigError(f"{self.output} is a folder: name a file in it, as -o {self.output / 'report.html'}")


def _run(config: ReportConfig) -> int:
    from zmqtrain.monitor.run_tables import load_all  # not for --help
    from zmqtrain.report.contents import write_report

    log_to_stderr(config.verbose)
    runs = load_all(config.records)
    write_report(runs, config.output, config.title)
    names = ", ".join(run.label for run in runs)
    say(f"wrote {config.output}: the report of {names}; a browser opens it")
    for run in runs:
        if run.damaged:
            say(f"note: {run.damaged:,} lines of {run.label} hold no record, as if torn; they were left out")
    return 0


main = command(ReportConfig, PROGRAM, _run)

if __name__ == "__main__":
    sys.exit(main())
