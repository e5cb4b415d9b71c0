"""Record what happens in a run, real or simulated, in one vocabulary."""

from zmqtrain.monitor.recorder import BrokerRecorder, NodeRecorder

__all__ = ["BrokerRecorder", "NodeRecorder"]
