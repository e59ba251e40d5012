"""Peak memory: of a child too, shared memory once, the peak and not the end."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from eaglenest.services.memory import PeakMemory, own_tree, resident_bytes

MIB = 1 << 20


def test_the_peak_of_a_child_stays_when_it_is_gone() -> None:
    code = "x = bytearray(80 << 20); x[::4096] = b'1' * len(x[::4096]); import time; time.sleep(0.8)"

    with PeakMemory(interval_s=0.05) as peak:
        before = peak.peak_bytes
        subprocess.run([sys.executable, "-c", code], check=True)

    assert 78 * MIB < peak.peak_bytes - before < 120 * MIB
    assert peak.sample() < peak.peak_bytes - 60 * MIB


def test_a_process_named_twice_counts_once() -> None:
    once = resident_bytes([psutil.Process()])

    assert resident_bytes([psutil.Process(), psutil.Process()]) < 1.5 * once


def test_processes_that_end_meanwhile_are_no_trouble() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(child.pid)
    child.wait()

    def find() -> Iterator[psutil.Process]:
        yield gone
        yield from own_tree()

    with PeakMemory(find, interval_s=0.02) as peak:
        time.sleep(0.1)

    assert peak.peak_bytes > MIB
