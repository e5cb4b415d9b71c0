"""How bytes move: pacing (pure), the channel over ZeroMQ, and its public double in memory.

Nothing is imported here: `memory` and `pacing` are used where zmq is not wanted.
"""
