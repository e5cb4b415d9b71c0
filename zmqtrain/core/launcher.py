"""What the program that started this process says in its environment: a place in a job step, a service manager.

Rule: no setting comes from the environment unless the caller asks for it, as `size="environment"` does.
Source: srun(1) of Slurm 22.05, mpirun(1) of OpenMPI 4, Hydra of MPICH (PMI-1); sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from zmqtrain.core.errors import ConfigError

ENVIRONMENT: Final = "environment"
"""In place of a number: the program that started this process says it."""


@dataclass(frozen=True)
class JobStep:
    """A place in a job step. rank: from 0.  size: how many processes the step has.  job: the same text for all of them
    and for no other step; "" if the launcher gives none."""

    rank: int
    size: int
    job: str


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher. job: all of those that are set make the name of the step."""

    rank: str
    size: str
    job: tuple[str, ...]


LAUNCHERS = (
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
    _Launcher("PMI_RANK", "PMI_SIZE", ("PMI_JOBID",)),
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
)
"""In the order in which they count: an mpirun within a Slurm job starts its own helpers by srun."""


def job_step(environment: Mapping[str, str] = os.environ) -> JobStep:
    """Return this process's place, as srun, mpirun or mpiexec says it. Raises ConfigError if none of them does."""
    for launcher in LAUNCHERS:
        if launcher.rank not in environment:
            continue
        if launcher.size not in environment:
            raise ConfigError(
                f'size="environment": {launcher.rank} is set and {launcher.size} is not. In a batch script of Slurm '
                "start the processes with srun, as in: srun -n 4 python script.py"
            )
        rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
        if not rank < size:
            raise ConfigError(f'size="environment": {launcher.rank} is {rank}, and {launcher.size} is {size}')
        return JobStep(rank, size, ".".join(environment[name] for name in launcher.job if environment.get(name)))
    raise ConfigError(
        'size="environment": no launcher has said which process this is '
        f"({', '.join(launcher.rank for launcher in LAUNCHERS)} are not set). Start the processes with srun, mpirun or "
        "mpiexec, as in: srun -n 4 python script.py; or give size and rank as numbers"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f'size="environment": {name} is {text!r}, not a number')
    return int(text)


@dataclass(frozen=True)
class Service:
    """How the service manager listens. socket: NOTIFY_SOCKET, "" for none.  watchdog_seconds: this process is killed if
    it does not report for so long; 0: it is not."""

    socket: str
    watchdog_seconds: float


def service(environment: Mapping[str, str] = os.environ) -> Service:
    """Return how the service manager that started this process listens."""
    socket, wait = environment.get("NOTIFY_SOCKET", ""), environment.get("WATCHDOG_USEC", "")
    meant = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
    watched = bool(socket) and meant and wait.isascii() and wait.isdecimal()
    return Service(socket, int(wait) / 1e6 if watched else 0.0)
