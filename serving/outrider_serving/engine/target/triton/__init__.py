"""Attention over pages as Triton kernels. Only this package imports triton, which not every machine has."""
