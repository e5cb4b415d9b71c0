"""Do an allreduce by other libraries, where they are installed: torch's gloo, and OpenMPI by mpi4py.

Rule 1: nothing here is needed: `find_rivals` says which of them this Python has, and the others are left out.
Rule 2: they run as they come, with their own defaults, over the star's links and no shared memory; OpenMPI once more
with the algorithm that suits large arrays ("segmented ring").
Rule 3: OpenMPI starts its own processes: its launcher runs on the hub, and reaches a node by `agent` instead of ssh.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["LAUNCHED_TOGETHER", "Gloo", "OpenMPI", "exec_mpirun", "find_rivals", "main"]

PORT = 29500
SEGMENTED_RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "5")
LAUNCHED_TOGETHER = {"openmpi": (), "openmpi segmented ring": SEGMENTED_RING}
"""By library: what its launcher is told besides."""


def find_rivals() -> dict[str, bool]:
    """Return by name whether each is installed here."""
    openmpi = find_spec("mpi4py") is not None and shutil.which("mpirun") is not None
    return {"gloo": find_spec("torch") is not None, **dict.fromkeys(LAUNCHED_TOGETHER, openmpi)}


class Gloo:
    """One rank of a group of torch.distributed, over gloo; rank 0 listens at `address`."""

    def __init__(self, address: str, size: int, rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        import torch.distributed

        self._torch: Any = torch
        self.rank = rank
        torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", world_size=size, rank=rank)

    def allreduce(self, values: np.ndarray[Any, Any], algorithm: str) -> None:
        """Add up, in place."""
        self._torch.distributed.all_reduce(self._torch.from_numpy(values))

    def barrier(self) -> None:
        """Wait for all."""
        self._torch.distributed.barrier()

    def bytes_sent(self) -> int | None:
        """It does not count them."""
        return None

    def close(self) -> None:
        """Leave the group."""
        self._torch.distributed.destroy_process_group()


class OpenMPI:
    """One rank of MPI.COMM_WORLD."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self.rank = int(self._world.Get_rank())

    def allreduce(self, values: np.ndarray[Any, Any], algorithm: str) -> None:
        """Add up, in place."""
        self._world.Allreduce(self._mpi.IN_PLACE, values)

    def barrier(self) -> None:
        """Wait for all."""
        self._world.Barrier()

    def bytes_sent(self) -> int | None:
        """It does not count them."""
        return None

    def close(self) -> None:
        """Nothing is left to do: mpi4py ends with the process."""


def exec_mpirun(library: str, star_name: str, addresses: list[str], script: str, *arguments: str) -> None:
    """Become the launcher that runs `script` with these arguments on the nodes with these addresses."""
    agent = f"{sys.executable} {Path(__file__).resolve()} {star_name}"
    over_the_star = ("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0")
    launch = ("--mca", "oob_tcp_if_include", "eth0", "--mca", "plm_rsh_agent", agent, "-x", "PYTHONPATH")
    hosts = ",".join(f"{address}:1" for address in addresses)
    program = (sys.executable, script, *arguments)
    argv = ["mpirun", "--allow-run-as-root", "-np", str(len(addresses)), "--host", hosts]
    os.execvp("mpirun", [*argv, *over_the_star, *launch, *LAUNCHED_TOGETHER[library], *program])


def main() -> None:
    """Be the launcher's agent: run a command on the node with this address: `rivals.py STAR ADDRESS COMMAND...`.

    The node gets a host name of its own, for OpenMPI takes hosts of one name for one host.
    """
    star_name, address, *command = sys.argv[1:]
    node = f"n{int(address.rpartition('.')[2]) - 1}"
    within = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec sh -c "$*"', node, *command]
    os.execvp("ip", ["ip", "netns", "exec", f"{star_name}-{node}", *within])


if __name__ == "__main__":
    main()
