"""What is said of the machine."""

from loadtest.machine import machine


def test_cores_and_python_are_named():
    assert "cores, " in machine()
    assert "Python 3." in machine()
