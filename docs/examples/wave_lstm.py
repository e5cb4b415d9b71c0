"""Train a deep LSTM on four processes, a part of its layers on each: layers x time steps run as a wave.

    python wave_lstm.py                                          # a broker and four processes on this PC, and one alone
    zmqtrain-broker                                              # or by hand: on the hub,
    python wave_lstm.py tcp://hub:5555 --keys ~/lab.key_secret   # and on each of four PCs

A cell needs its layer's cell of the time step before and the layer below at its own time step. Nobody wrote an order
down beyond that: each process pushes its cells, an `irecv` for what comes from below and an `isend` for what goes
above, and the engine runs each when what it reads is there. So layer 1 computes time step 0 while layer 0 computes
time step 1; the backward pass is a wave from the last layer and time step to the first. The weights are those of one
process that has all layers, bit for bit. wave.json shows the wave at ui.perfetto.dev, and a picture is printed.
"""

import argparse
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np

import zmqtrain as zt

TIMES, WIDTH, BATCH, RATE = 16, 96, 64, 0.5
COLUMNS = 100


def batches(count):
    """Give (inputs, wanted), float32[TIMES, BATCH, WIDTH] each: the same on all processes."""
    generator = np.random.default_rng(1)
    teacher = generator.normal(0, WIDTH**-0.5, (WIDTH, WIDTH))
    for _ in range(count):
        inputs = generator.normal(size=(TIMES, BATCH, WIDTH))
        yield inputs.astype(np.float32), (0.3 + 0.3 * np.tanh(inputs @ teacher)).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Layer:
    """The variables of one layer. below, error: what comes in at each time step, and the loss's gradient by it."""

    def __init__(self, engine, number):
        generator = np.random.default_rng((2, number))
        first = generator.normal(0, (2 * WIDTH) ** -0.5, (2 * WIDTH + 1, 4 * WIDTH)).astype(np.float32)
        self.number = number
        self.weights = engine.variable(first, f"weights {number}")
        self.gradient = engine.variable(name=f"gradient {number}")
        self.state = engine.variable(name=f"state {number}")
        self.state_error = engine.variable(name=f"error of state {number}")
        self.below, self.error, self.tape = (
            [engine.variable(name=f"{what} {number},{time}") for time in range(TIMES)]
            for what in ("below", "error", "tape")
        )


class Wave:
    """This process's layers, and the operations that one step pushes. comm: None for one process with all layers."""

    def __init__(self, engine, comm, layers):
        self.engine, self.comm = engine, comm
        self.rank, self.size = (comm.rank, comm.size) if comm is not None else (0, 1)
        own = range(layers * self.rank // self.size, layers * (self.rank + 1) // self.size)
        self.layers = [Layer(engine, number) for number in own]
        self.above = Layer(engine, layers if self.rank == self.size - 1 else self.layers[-1].number + 1)
        self.loss = engine.variable(0.0, "loss")

    def push_step(self, inputs, wanted):
        """Push one step: forward, backward and update. It returns at once."""
        for layer in self.layers:
            nothing = np.zeros((BATCH, WIDTH), np.float32)
            self.engine.push(lambda zero=nothing: (zero, zero), mutate=[layer.state], name="begin")
            self.engine.push(lambda zero=nothing: (zero, zero), mutate=[layer.state_error], name="begin")
            self.engine.push(lambda layer=layer: np.zeros_like(layer.weights.value), [layer.weights], [layer.gradient])
        for time in range(TIMES):
            self.push_forward(time, inputs)
        for time in reversed(range(TIMES)):
            self.push_backward(time, wanted)
        for layer in self.layers:
            self.engine.push(
                lambda layer=layer: layer.weights.value - np.float32(RATE) * layer.gradient.value,
                read=[layer.gradient],
                mutate=[layer.weights],
                name=f"update {layer.number}",
            )

    def push_forward(self, time, inputs):
        """Push what one time step is upward: receive, this process's cells, send."""
        engine, first, last = self.engine, self.layers[0].below[time], self.above.below[time]
        if self.rank == 0:
            engine.push(lambda: inputs[time], mutate=[first], name="inputs")
        else:
            engine.push_request(lambda: self.comm.irecv(self.rank - 1, time), mutate=[first], name=f"receive {time}")
        for layer, above in zip(self.layers, [*self.layers[1:], self.above], strict=True):
            engine.push(
                lambda layer=layer: self.forward(layer, time),
                read=[layer.below[time], layer.weights],
                mutate=[above.below[time], layer.state, layer.tape[time]],
                name=f"forward {layer.number},{time}",
            )
        if self.rank < self.size - 1:
            engine.push_request(lambda: self.comm.isend(last.value, self.rank + 1, time), [last], name=f"send {time}")

    def push_backward(self, time, wanted):
        """Push what one time step is downward. Its messages have tags of their own."""
        engine, tag = self.engine, TIMES + time
        first, last = self.layers[0].error[time], self.above.error[time]
        if self.rank == self.size - 1:
            engine.push(
                lambda: self.compare(time, wanted[time]),
                read=[self.above.below[time]],
                mutate=[last, self.loss],
                name=f"loss {time}",
            )
        else:
            engine.push_request(
                lambda: self.comm.irecv(self.rank + 1, tag), mutate=[last], name=f"receive error {time}"
            )
        for layer, above in reversed([*zip(self.layers, [*self.layers[1:], self.above], strict=True)]):
            engine.push(
                lambda layer=layer, above=above: self.backward(layer, time, above.error[time].value),
                read=[above.error[time], layer.tape[time], layer.weights],
                mutate=[layer.error[time], layer.state_error, layer.gradient],
                name=f"backward {layer.number},{time}",
            )
        if self.rank > 0:
            engine.push_request(lambda: self.comm.isend(first.value, self.rank - 1, tag), [first], name="send error")

    def forward(self, layer, time):
        """Return what a cell gives to the layer above; keep the layer's state, and what its backward pass needs."""
        hidden, cell = layer.state.value
        joined = np.concatenate([layer.below[time].value, hidden, np.ones((BATCH, 1), np.float32)], axis=1)
        gates = joined @ layer.weights.value
        enter, forget, leave = (sigmoid(gates[:, i * WIDTH : (i + 1) * WIDTH]) for i in range(3))
        fresh = np.tanh(gates[:, 3 * WIDTH :])
        after = forget * cell + enter * fresh
        hidden = leave * np.tanh(after)
        layer.state.value = hidden, after
        layer.tape[time].value = joined, enter, forget, leave, fresh, cell, after
        return hidden

    def compare(self, time, wanted):
        """Add a time step's share to the loss, and return the gradient by what the last layer has given."""
        difference = self.above.below[time].value - wanted
        self.loss.value = (0.0 if time == TIMES - 1 else self.loss.value) + float((difference**2).mean()) / TIMES
        return 2 * difference / np.float32(BATCH * TIMES)

    def backward(self, layer, time, error):
        """Return the gradient by what has come from below; add to that of the weights."""
        joined, enter, forget, leave, fresh, cell, after = layer.tape[time].value
        hidden_error, after_error = layer.state_error.value
        error = error + hidden_error
        squashed = np.tanh(after)
        after_error = after_error + error * leave * (1 - squashed**2)
        gates = [
            after_error * fresh * enter * (1 - enter),
            after_error * cell * forget * (1 - forget),
            error * squashed * leave * (1 - leave),
            after_error * enter * (1 - fresh**2),
        ]
        gate_error = np.concatenate(gates, axis=1)
        layer.gradient.value += joined.T @ gate_error
        joined_error = gate_error @ layer.weights.value.T
        layer.state_error.value = np.ascontiguousarray(joined_error[:, WIDTH : 2 * WIDTH]), after_error * forget
        return np.ascontiguousarray(joined_error[:, :WIDTH])


def train(comm, options):
    """Train this process's layers; print the checksum of each, and write the trace."""
    rank = 0 if comm is None else comm.rank
    alone = "" if comm is not None else "-alone"
    with zt.Engine(2, name=f"rank {rank}", trace=True) as engine:
        wave, losses = Wave(engine, comm, options.layers), []
        for inputs, wanted in batches(options.steps):
            wave.push_step(inputs, wanted)
            losses.append(engine.wait(wave.loss))
        engine.wait_all()
        engine.write_trace(options.trace / f"wave{alone}-{rank}.json")
    lines = [f"layer {one.number}: weights {zlib.crc32(one.weights.value.tobytes()):08x}" for one in wave.layers]
    if wave.rank == wave.size - 1:
        lines.append(f"loss {losses[0]:.5f}, in the end {losses[-1]:.5f}")
    print("\n".join(lines) + "\n", end="", flush=True)


def draw(folder, size, layers):
    """Return the last step as text, a row for each layer: digits are forward cells, letters backward ones."""
    from zmqtrain.engine.graph import merge_traces

    traces = [json.loads((folder / f"wave-{rank}.json").read_text()) for rank in range(size)]
    (folder / "wave.json").write_text(json.dumps(merge_traces(traces)))
    cells = {}  # by direction, layer and time step: the last time that it ran
    for event in (event for trace in traces for event in trace["traceEvents"] if event["ph"] == "X"):
        if event["name"].startswith(("forward", "backward")):
            cells[event["name"]] = max(cells.get(event["name"], (0, 0)), (event["ts"], event["ts"] + event["dur"]))
    begin, end = min(start for start, _ in cells.values()), max(end for _, end in cells.values())
    rows = [[" "] * (COLUMNS + 1) for _ in range(layers)]
    for name, (start, stop) in cells.items():
        direction, _, place = name.partition(" ")
        layer, time = map(int, place.split(","))
        mark = "0123456789"[time % 10] if direction == "forward" else "abcdefghijklmnopqrstuvwxyz"[time % 26]
        span = [round((at - begin) / (end - begin) * COLUMNS) for at in (start, stop)]
        rows[layer][span[0] : span[1] + 1] = mark * (span[1] - span[0] + 1)
    drawn = [f"layer {layer:2} |{''.join(row)}|" for layer, row in enumerate(rows)]
    return "\n".join([f"the last step, {(end - begin) / 1000:.1f} ms:", *drawn])


def start_all(options):
    """Run all processes here, and one that has all layers; compare their weights, and draw the wave."""
    command = [sys.executable, __file__, "--layers", str(options.layers), "--steps", str(options.steps)]
    command += ["--trace", str(options.trace), "--size"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # the processes share this PC's cores
    with zt.BrokerThread("tcp://127.0.0.1:0", zt.RunSettings(program="")) as broker:
        pipe = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        sizes = [(1, []), *[(options.size, [broker.address, "--rank", str(rank)]) for rank in range(options.size)]]
        processes = [subprocess.Popen([*command, str(size), *where], **pipe) for size, where in sizes]
        try:
            alone, *parts = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()  # where it was interrupted; who has ended does not mind
    print(alone, end="")
    if any(process.returncode for process in processes) or "".join(parts) != alone:
        raise SystemExit(f"{options.size} processes ended with other weights:\n{''.join(parts)}")
    print(f"{options.size} processes: the same, bit for bit")
    print(draw(options.trace, options.size, options.layers))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", nargs="?", help="the broker's address, as tcp://hub:5555; none: start all of it here")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret), where the broker has keys")
    parser.add_argument("--size", type=int, default=4, help="how many processes there are (default %(default)s)")
    parser.add_argument("--rank", type=int, help="which one this is, from 0; without: in order of arrival")
    parser.add_argument("--layers", type=int, default=4, help="of the network (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="how many (default %(default)s)")
    parser.add_argument("--trace", type=Path, default=Path(), help="the folder that traces are written to")
    options = parser.parse_args()
    if not 1 <= options.size <= options.layers:
        parser.error("--size must be at least 1, and --layers at least as many")
    if options.hub is not None:
        with zt.Communicator.create(options.hub, options.size, options.rank, keys=options.keys) as comm:
            train(comm, options)
    elif options.size == 1:
        train(None, options)
    else:
        start_all(options)


if __name__ == "__main__":
    try:
        main()
    except zt.ZmqTrainError as error:
        sys.exit(f"wave_lstm: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
