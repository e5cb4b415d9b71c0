"""Run the whole exercise on this PC, and write a table and two plots: how long it takes, and how well it learns.

    python run.py --data FOLDER            # MNIST: a network of 784-30-10; without --data the digits of scikit-learn
    python run.py --workers 1 2 --shards 2 --epochs 2

Each line of the table is a way to train, each column a number of workers. All processes are real, and talk over real
sockets: a broker where they meet, and for asynchronous training one more for each further broker.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from data import load

import zmqtrain as zt

HERE = Path(__file__).parent
SYNCHRONOUS = {"auto": "synchronous, collective", "naive": "synchronous, naive", "ring": "synchronous, ring"}
ONE_THREAD = dict.fromkeys(["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"], "1")
"""Each process computes on one core: with more, eight of them on one PC would only wait for each other."""


def main():
    """Run everything that the arguments ask for."""
    options = parse()
    try:
        load(options.data)  # what is wrong with the data is said here, once
    except zt.ZmqTrainError as error:
        hint = "without --data the digits of scikit-learn are taken" if options.data else "or name a folder with --data"
        sys.exit(f"run.py: {error}; {hint}")
    options.output.mkdir(parents=True, exist_ok=True)
    results = []
    runs = [(way, workers) for way in ways(options) for workers in options.workers]
    for number, (way, workers) in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {way['name']}, {workers} worker{'s' * (workers > 1)} ...", end=" ", flush=True)
        outcome = run(way, workers, options)
        results.append({"way": way["name"], "workers": workers, **outcome})
        print(f"{outcome['seconds']:.1f} s, {100 * outcome['accuracy']:.1f} % right", flush=True)
        settings = {name: getattr(options, name) for name in ("epochs", "batch", "rate", "limit")}
        (options.output / "results.json").write_text(json.dumps({**settings, "results": results}, indent=1) + "\n")
    text = table(results, options.workers)
    (options.output / "results.txt").write_text(text)
    print(f"\n{text}\nin {options.output}: results.json, results.txt{plot(results, options.output)}")


def ways(options):
    """Return the ways to train: a name, the worker's method, and how many brokers."""
    found = [{"name": name, "method": method, "shards": 0} for method, name in SYNCHRONOUS.items()]
    asynchronous = [(shards, "") for shards in options.shards]
    if options.naive and options.shards:
        asynchronous.append((max(options.shards), ", naive"))
    for shards, naive in asynchronous:
        name = f"asynchronous, {shards} broker{'s' * (shards > 1)}{naive}"
        found.append({"name": name, "method": "async", "shards": shards, "naive": bool(naive)})
    return found


def run(way, workers, options):
    """Start the processes of one run; return what worker 0 printed."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(broker()) for _ in range(max(1, way["shards"]))]
        command = [sys.executable, str(HERE / "worker.py"), way["method"], "--hub", addresses[0]]
        command += ["--workers", str(workers), "--data", options.data]
        command += ["--batch", str(options.batch), "--epochs", str(options.epochs), "--rate", str(options.rate)]
        command += ["--limit", str(options.limit)] if options.limit else []
        command += ["--naive"] if way.get("naive") else []
        command += ["--shards", *addresses] if way["shards"] else []
        processes = [stack.enter_context(process([*command, "--rank", str(rank)])) for rank in range(workers)]
        try:
            printed = [each.communicate(timeout=options.timeout) for each in processes]
        except subprocess.TimeoutExpired:
            sys.exit(f"\nrun.py: this run has taken more than {options.timeout:g} s; give it more with --timeout")
        if any(each.returncode for each in processes):
            complaints = "".join(complaint for _, complaint in printed)
            sys.exit(f"\nrun.py: the run failed; the workers say:\n{complaints}")
    return json.loads(printed[0][0])


@contextmanager
def process(command):
    """Start a process of the exercise; it ends with the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment()) as started:
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def broker():
    """Start a broker on a free port of this PC; give its address. If the run fails, tell what it said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "zmqtrain.cli", "broker", "--bind", address, "--no-checkpoint"]
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())
        try:
            yield address
        except SystemExit:
            log.seek(0)
            print(f"\nthe broker at {address} says:\n{log.read()}", file=sys.stderr)
            raise
        finally:
            started.kill()
            started.wait()


def environment():
    """Return the environment of every process: one thread each, and this very zmqtrain, installed or not."""
    path = os.pathsep.join(filter(None, [str(Path(zt.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": path}


def table(results, workers):
    """Return the run times and accuracies as text, a column for each number of workers."""
    ways = list(dict.fromkeys(result["way"] for result in results))
    found = {(result["way"], result["workers"]): result for result in results}
    lines = []
    for title, cell in (
        ("seconds", lambda result: f"{result['seconds']:.1f}"),
        ("% of the test images right", lambda result: f"{100 * result['accuracy']:.1f}"),
    ):
        lines += [title, f"{'workers':<32}" + "".join(f"{count:>8}" for count in workers)]
        lines += [f"{way:<32}" + "".join(f"{cell(found[way, count]):>8}" for count in workers) for way in ways]
        lines.append("")
    return "\n".join(lines)


def plot(results, folder):
    """Draw run times and accuracies against the number of workers; return what to say of it."""
    try:
        import matplotlib
    except ImportError:
        return "; no plots, for matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, label, scale in (("seconds", "seconds", 1), ("accuracy", "% of the test images right", 100)):
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for way in dict.fromkeys(result["way"] for result in results):
            points = [(result["workers"], scale * result[name]) for result in results if result["way"] == way]
            axes.plot(*zip(*points, strict=True), "--o" if way.startswith("asynchronous") else "-s", label=way, ms=4)
        counts = sorted({result["workers"] for result in results})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set(xlabel="workers", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)
    return ", seconds.png, accuracy.png"


def parse():
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="The course's exercise: train by every method, and compare.")
    parser.add_argument("--data", default="", help="a folder in the format of MNIST; without, scikit-learn's digits")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 2, 4], help="of asynchronous training")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--limit", type=int, default=0, help="end each run after so many steps of a worker")
    parser.add_argument("--naive", action="store_true", help="asynchronously also as one would at first: see it fail")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one run may take")
    parser.add_argument("--output", type=Path, default=Path("runs/course"))
    options = parser.parse_args()
    if min(options.workers + options.shards, default=1) < 1:
        parser.error("--workers and --shards are numbers from 1 on")
    return options


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
