"""Kernels for GPUs in Triton's language. Imported by `load_ops` alone, and only where triton is installed.

Every kernel has a reference implementation in plain torch in `decoder_ops`, is compared with it on the device at the start, and in
the tests; without a GPU these run it in Triton's interpreter.
"""
