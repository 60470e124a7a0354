"""Kernel cases: inputs, reference, bytes, flops and tolerance of each verb, shared by tests and benchmarks."""
