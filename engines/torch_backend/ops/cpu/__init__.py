"""Kernels for CPUs in C++, compiled at first use; where they cannot be, torch computes the same more slowly."""
