"""Train a language model with a stage of it on each of three PCs; none of them ever holds the whole model.

    python pipeline_text.py                                          # a broker and three processes on this PC
    zmqtrain-broker                                                  # or by hand: on the hub,
    python pipeline_text.py tcp://hub:5555 --keys ~/lab.key_secret   # and on each of three PCs

The PCs measure the parts of the model, and share it so that all take the same time. Each process makes its own
parameters, reads its own part of each batch, and saves its share of the model into one file at the first PC. The tasks
of each stage are written to pipeline-STAGE.jsonl, which `zmqtrain page FOLDER` draws.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import zmqtrain as zt
from zmqtrain.programs.text import TextProgram


def train(comm, options):
    """Be one stage."""
    program = TextProgram(
        width=options.width, layers=options.layers, batch=options.batch, tied=False, clip=0.0, warmup=1
    )
    batches = [batch for unit in range(options.steps) for batch in program.batches(unit)][: options.steps]
    with zt.Pipeline.create(
        comm, program.loss, program.init, program.optimizer(), batches[0],
        micro_batches=options.micro_batches, key=0, codec=options.codec,
    ) as pipeline:  # fmt: skip
        pipeline.record()
        if comm.rank == 0:
            print(pipeline.placement, flush=True)
        for step, loss in enumerate(pipeline.steps(batches), 1):
            if comm.rank == 0 and (step == 1 or step % 5 == 0):
                print(f"step {step}: loss {loss:.4f}", flush=True)
        pipeline.save(options.folder / "model.safetensors")
        stage, sent = pipeline.stage, pipeline.statistics.bytes_sent / 1e6
        pipeline.write_record(options.folder / f"pipeline-{stage.number}.jsonl")
        print(f"stage {stage.number} holds {stage.parameter_bytes / 1e6:.2f} MB, has sent {sent:.1f} MB")


def start_all(options):
    """Run a broker and all stages on this PC."""
    with zt.BrokerThread("tcp://127.0.0.1:0", zt.RunSettings(program="")) as broker:
        command = [sys.executable, __file__, broker.address, *options.given]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.size)]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()  # where this was interrupted
    if any(codes):
        raise SystemExit(f"pipeline_text: the stages ended with {codes}")
    whole = zt.load_model(options.folder / "model.safetensors")
    print(f"{options.folder / 'model.safetensors'}: {len(whole)} leaves of the whole model")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", nargs="?", help="the broker's address, as tcp://hub:5555; none: start all of it here")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret), where the broker has keys")
    parser.add_argument("--size", type=int, default=3, help="how many stages (default %(default)s)")
    parser.add_argument("--rank", type=int, help="which stage this is, from 0; without: in order of arrival")
    parser.add_argument("--width", type=int, default=128, help="of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (default %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="windows of text a step (default %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="parts of a batch (default %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="how many (default %(default)s)")
    parser.add_argument("--codec", default="bf16", help="of what travels (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the model and the record are written")
    options = parser.parse_args()
    options.given = sys.argv[1:]
    if options.hub is None:
        start_all(options)
    else:
        with zt.Communicator.create(options.hub, options.size, options.rank, keys=options.keys) as comm:
            train(comm, options)


if __name__ == "__main__":
    try:
        main()
    except zt.ZmqTrainError as error:
        sys.exit(f"pipeline_text: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
