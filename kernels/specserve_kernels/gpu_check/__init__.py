"""Checks and measures the Triton kernels on a GPU; see __main__.py."""
