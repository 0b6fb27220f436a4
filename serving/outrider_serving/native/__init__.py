"""Compiled code for CPUs: how it is built and found. `engine.target.native` runs the target by it."""
