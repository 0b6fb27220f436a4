"""The target pass on a GPU: attention by Triton kernels, and graphs of whole passes for small batches."""
