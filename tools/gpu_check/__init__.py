"""What only a GPU can show of the target pass: that kernels and graphs are right, and how fast they are.

`python -m tools.gpu_check --help`. It needs `serving` in PYTHONPATH, and torch, transformers and triton.
Models have random weights of published shapes, so it needs no network.
"""
