"""Outrider on one machine: a real one-node cluster, and everything `make up` does with it.

This package uses the standard library only (``hello`` excepted), because it has to run with the bare
system Python before the project's own environment exists.
"""
