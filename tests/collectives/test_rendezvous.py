"""What a process does to itself when it opens a port."""

from __future__ import annotations

import resource
import subprocess
import sys

SCRIPT = """
import resource
import numpy as np
from zmqtrain.collectives.mesh import keep_freed_memory

def use():
    return [np.ones(2 << 20, np.uint8) for _ in range(4)]

keep_freed_memory()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_was_freed_is_used_again_without_a_fault_for_each_of_its_pages() -> None:
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    pages = 10 * 4 * (2 << 20) // resource.getpagesize()
    assert int(printed) < pages / 4
