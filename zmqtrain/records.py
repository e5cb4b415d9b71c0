"""The records of a run as columns of numpy arrays: `zmqtrain.records.load`.

run = zmqtrain.records.load("records")
run.evaluations["seconds"], run.evaluations["loss"]
run.deltas.to_pandas()
"""

from zmqtrain.monitor.run_tables import Run, Table, load, load_all

__all__ = ["Run", "Table", "load", "load_all"]
