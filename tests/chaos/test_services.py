"""Services: kept alive as a service manager would, and nothing that was done to them outlives them."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from zmqtrain.chaos.services import Service

TALKER = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "write":
        try:
            with open(sys.argv[1], "w") as file:
                file.write("x")
            print("room", flush=True)
        except OSError as error:
            print("full", flush=True)
    else:
        sys.exit(int(line))
"""
TELLER = """
import sys, time
for line in sys.stdin:
    print("days", (time.time() - time.monotonic()) / 86_400, flush=True)
"""
BOUND_SECONDS = 60.0


def module(folder, name, source):
    """Write a module; return the variables with which a process finds it."""
    (folder / f"{name}.py").write_text(source)
    return {"PYTHONPATH": f"{Path(__file__).parents[2]}:{folder}", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def service(tmp_path):
    """A program that does as it is told: "write" to a file, or end with a code."""

    environment = module(tmp_path, "talker", TALKER)
    line = [str(tmp_path / "file")]
    made = Service(tmp_path, "one", "talker", line, environment=environment, ready="ready", restart_seconds=0.0)
    with made:
        assert made.wait_ready(BOUND_SECONDS)
        yield made
    assert all(life.process.poll() is not None for life in made.lives)


def tell(service, line):
    service.process.stdin.write(f"{line}\n".encode())
    service.process.stdin.flush()


def until(condition, service=None):
    end = time.monotonic() + BOUND_SECONDS
    while not condition():
        assert time.monotonic() < end
        if service is not None:
            service.look()


def answer(service, count):
    """Wait until it has said so many lines, and return the last."""
    until(lambda: service.log.exists() and len(service.log.read_text().splitlines()) >= count, service)
    return service.log.read_text().splitlines()[-1]


def state(service):
    return Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_who_is_killed_is_started_again_with_the_same_line(service):
    service.kill()
    until(lambda: len(service.lives) == 2, service)
    assert service.wait_ready(BOUND_SECONDS) and service.lives[0].code == -9 and service.lives[0].killed
    tell(service, "3")
    until(lambda: len(service.lives) == 3, service)
    assert service.lives[1].code == 3 and not service.lives[1].killed


def test_who_ends_well_or_is_not_wanted_is_not_started_again(service):
    tell(service, "0")
    until(lambda: service.over, service)
    service.look()
    assert len(service.lives) == 1 and not service.alive
    service.begin()
    assert service.wait_ready(BOUND_SECONDS)
    service.interrupt()
    until(lambda: not service.alive, service)
    service.look()
    assert len(service.lives) == 2


def test_who_is_stopped_stands_still_until_it_goes_on(service):
    service.stop()
    until(lambda: state(service) == "T")
    service.go_on()
    until(lambda: state(service) != "T")


def test_who_is_slowed_stands_still_for_a_share_of_the_time(service):
    service.slow(0.5)
    until(lambda: state(service) == "T", service)
    until(lambda: state(service) != "T", service)
    service.go_on()
    until(lambda: state(service) != "T", service)


def test_a_full_disk_takes_nothing_until_it_is_freed_not_from_who_is_started_again_either(service):
    tell(service, "write")
    assert answer(service, 2) == "room"
    service.fill_disk()
    tell(service, "write")
    assert answer(service, 3) == "full"
    service.kill()
    until(lambda: len(service.lives) == 2, service)
    assert resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)[0] == 0
    service.free_disk()
    tell(service, "write")
    assert answer(service, 5) == "room"


def test_a_wall_clock_jumps_in_one_process_and_its_monotonic_clock_does_not(tmp_path):
    with Service(tmp_path, "one", "teller", environment=module(tmp_path, "teller", TELLER)) as service:
        tell(service, "")
        before = float(answer(service, 1).split()[1])
        service.jump_clock(36_525.0)
        tell(service, "")
        assert round(float(answer(service, 2).split()[1]) - before) == 36_525
        service.jump_clock(-36_525.0)
        tell(service, "")
        assert round(float(answer(service, 3).split()[1]) - before) == 0
