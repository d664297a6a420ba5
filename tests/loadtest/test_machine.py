"""What is said of the machine."""

import psutil

from loadtest.machine import machine, measure_round_trip_s


def test_waking_a_process_takes_a_time_and_leaves_no_process():
    before = psutil.Process().children()
    assert 1e-6 < measure_round_trip_s() < 0.1
    assert psutil.Process().children() == before


def test_cores_and_python_are_named():
    assert "cores, " in machine()
    assert "Python 3." in machine()
