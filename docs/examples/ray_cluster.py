"""Train on a Ray cluster: an actor is the broker, one actor on each machine is a node, and Ray restarts what dies.

    pip install "ray>=2.40"
    python ray_cluster.py --nodes 4                       # Ray on this PC; or, where a cluster runs:
    python ray_cluster.py --cluster auto --nodes 16 --folder /shared/run

A node that dies loses what it had not sent; Ray starts it again, and it takes the run's parameters. The broker deals
the data units that it had not finished to the others. A broker that dies goes on from its checkpoint: give a folder
that all machines see, because Ray may start it elsewhere. The traffic is encrypted, with keys that the driver makes.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import ray

import zmqtrain as zt


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=64)
class Hub:
    """The broker, in a thread of its actor."""

    def __init__(self, keys, port, folder, units):
        address = f"tcp://{ray.util.get_node_ip_address()}:{port}"
        # a machine that Ray fills with other work may be silent for long
        settings = zt.RunSettings(program="image", units=units, initial="founder", lost_seconds=20.0)
        self.thread = zt.BrokerThread(address, settings, keys=keys, checkpoint=Path(folder).expanduser())

    def address(self):
        """Return where nodes connect; "" once the run is over."""
        return self.thread.address if self.thread.running else ""

    def names(self):
        """Return the names of the nodes that are in the run now."""
        roster = self.thread.roster
        return [] if roster is None else [member["name"] for member in roster.members]


@ray.remote(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class Node:
    """A node. On machines with GPUs start it with `Node.options(num_gpus=1)`."""

    def train(self, hub, hub_key, name):
        """Train until the run is over; return how it went and the model, or None if it was over before."""
        if not (address := ray.get(hub.address.remote())):
            return None
        program = zt.load_program("image")
        with zt.connect(address, name, keys=zt.CurveKeys.generate(hub_key), timeout_seconds=60) as node:
            result = zt.TrainingLoop(program, node).run(node.batches(program))
        return result.summary, jax.tree.map(np.asarray, result.params)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help='"auto", or ray://host:10001; not given: Ray starts on this PC')
    parser.add_argument("--nodes", type=int, default=2, help="how many nodes (default %(default)s)")
    parser.add_argument("--units", type=int, default=40, help="data units in all (default %(default)s)")
    parser.add_argument("--folder", default="ray-run", help="of the broker's checkpoints (default %(default)s)")
    parser.add_argument("--port", type=int, default=5555, help="of the broker (default %(default)s)")
    parser.add_argument("--model", default="ray-model.safetensors", help="the file of the model (default %(default)s)")
    parser.add_argument("--kill", action="store_true", help="kill a node in the midst of the run, to see what happens")
    options = parser.parse_args()

    ray.init(address=options.cluster)
    keys = zt.CurveKeys.generate()
    hub = Hub.remote(keys, options.port, options.folder, options.units)
    nodes = [Node.remote() for _ in range(options.nodes)]
    training = [node.train.remote(hub, keys.public, f"node-{number}") for number, node in enumerate(nodes)]
    if options.kill:
        while "node-0" not in ray.get(hub.names.remote()):
            time.sleep(0.2)
        ray.kill(nodes[0], no_restart=False)
        print("killed node-0; Ray starts it again", flush=True)
    results = [result for result in ray.get(training) if result is not None]
    for summary, _ in results:
        print(", ".join(f"{name} {summary[name]:.4g}" for name in ("steps", "samples", "loss", "accuracy")))
    zt.save_model(options.model, results[0][1])
    print(f"the model of {len(results)} nodes is in {options.model}")


if __name__ == "__main__":
    main()
