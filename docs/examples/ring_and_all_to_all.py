"""Pass a large array round a ring, and exchange one with everybody, by isend, improbe and imrecv.

    python ring_and_all_to_all.py                                # a broker and four processes on this PC
    zmqtrain-broker                                              # or by hand: on the hub,
    python ring_and_all_to_all.py tcp://hub:5555 --keys ~/lab.key_secret     # and on each of four PCs
    srun -n 4 python ring_and_all_to_all.py tcp://hub:5555 --size environment    # or four tasks of a Slurm job

An array is announced by a begin mark (how many values come) and followed by an end mark (its checksum), each a message
with a tag of its own. Nobody waits for a certain message: each process looks for messages, and takes them.
"""

import argparse
import subprocess
import sys
import time
import zlib

import numpy as np

import zmqtrain as zt

BEGIN, VALUES, END = 1, 2, 3
LOOK_SECONDS = 0.0005


def send(comm, values, dest):
    """Send an array between its two marks; return the requests, which are over when `values` may be written over."""
    return [
        comm.isend(np.array([values.size]), dest, BEGIN),
        comm.isend(values, dest, VALUES),
        comm.isend(np.array([zlib.crc32(values)]), dest, END),
    ]


def receive(comm, sources):
    """Return by source the array that each of these ranks sends; stop if one is not what was sent."""
    arrays, checksums, requests = {}, {}, {}
    while not (checksums.keys() == requests.keys() == set(sources) and all(one.test() for one in requests.values())):
        message = comm.improbe()
        if message is None:
            time.sleep(LOOK_SECONDS)  # here a program would compute
            continue
        source, tag = message.status.source, message.status.tag
        if tag == BEGIN:
            arrays[source] = np.empty(int(comm.imrecv(message).wait()[0]), np.int32)
        elif tag == VALUES:
            requests[source] = comm.imrecv(message, into=arrays[source])
        elif tag == END:
            checksums[source] = int(comm.imrecv(message).wait()[0])
    for source in sources:
        requests[source].wait()  # raises what went wrong, if anything did
        if zlib.crc32(arrays[source]) != checksums[source]:
            raise SystemExit(f"rank {comm.rank}: what rank {source} sent has another checksum here")
    return arrays


def pass_round_the_ring(comm, values):
    """Send rank 0's array from each rank to the next until it is back; return it."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if comm.rank == 0:
        requests = send(comm, values, after)
        values = receive(comm, [before])[before]
    else:
        values = receive(comm, [before])[before]
        requests = send(comm, values, after)
    for request in requests:
        request.wait()
    return values


def exchange_with_all(comm, values):
    """Send an array to every other rank; return by source what they have sent."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [request for rank in others for request in send(comm, values, rank)]
    arrays = receive(comm, others)
    for request in requests:
        request.wait()
    return arrays


def say(line):
    """Print a line in one piece: several processes may share a terminal."""
    print(line + "\n", end="", flush=True)


def timed(comm, what, megabytes, run):
    """Run something that all ranks do; print on rank 0 how long it took, and how much each sent meanwhile."""
    comm.barrier()
    began = time.perf_counter()
    result = run()
    comm.barrier()
    seconds = time.perf_counter() - began
    if comm.rank == 0:
        say(f"{what}: {seconds:.2f} s, {megabytes / seconds:.0f} MB/s from each process")
    return result


def be_one_process(options):
    """Meet the others at the broker, and do both."""
    with zt.Communicator.create(options.hub, options.size, keys=options.keys) as comm:
        count = int(options.megabytes * 1e6 / 4)
        own = np.arange(count, dtype=np.int32) + comm.rank
        back = timed(comm, "ring", options.megabytes, lambda: pass_round_the_ring(comm, own))
        if not np.array_equal(back, np.arange(count, dtype=np.int32)):
            raise SystemExit(f"rank {comm.rank}: the array of the ring has changed")
        del back
        sent = options.megabytes * (comm.size - 1)
        for source, values in timed(comm, "all to all", sent, lambda: exchange_with_all(comm, own)).items():
            if not np.array_equal(values - np.int32(source), own - np.int32(comm.rank)):
                raise SystemExit(f"rank {comm.rank}: the array of rank {source} is not its own")
        say(f"rank {comm.rank} of {comm.size}: all checksums are right")


def start_all(options):
    """Start a broker and all processes here; return how many failed."""
    with zt.BrokerThread("tcp://127.0.0.1:0", zt.RunSettings()) as broker:
        command = [sys.executable, __file__, broker.address, "--size", str(options.size)]
        command += ["--megabytes", str(options.megabytes)]
        processes = [subprocess.Popen(command) for _ in range(options.size)]
        try:
            return sum(process.wait() != 0 for process in processes)
        finally:
            for process in processes:
                process.kill()  # where it was interrupted; who has ended does not mind


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", nargs="?", help="the broker's address, as tcp://hub:5555; none: start all of it here")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret), where the broker has keys")
    parser.add_argument("--size", default="4", help='how many there are, or "environment": as srun or mpirun says')
    parser.add_argument("--megabytes", type=float, default=400, help="of each array, int32 (default %(default)g)")
    options = parser.parse_args()
    if options.size != "environment" or options.hub is None:
        options.size = int(options.size) if options.size.isdecimal() else 0
        if options.size < 1:
            parser.error("--size must be at least 1, or environment where srun or mpirun has started this")
    if options.megabytes < 0:
        parser.error("--megabytes must not be below 0")
    if options.hub is not None:
        be_one_process(options)
    elif failed := start_all(options):
        raise SystemExit(f"{failed} of {options.size} processes failed")


if __name__ == "__main__":
    try:
        main()
    except zt.ZmqTrainError as error:
        sys.exit(f"ring_and_all_to_all: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
