"""The target on a GPU: Triton kernels from token ids to verdicts, one wait for the device per step.

Everything here also runs on CPU tensors in Triton's interpreter, which is how it is tested; what
only a device can do (CUDA graphs, pinned memory, memory accounting) is in `graphs.py` and
`device_memory.py`, and has never run. Importing the package needs neither triton nor a driver.
"""
