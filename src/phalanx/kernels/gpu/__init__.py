"""Triton kernels for CUDA. Each computes what the torch function of the same name, one folder up, defines.

Every kernel may be launched before the one ahead of it has ended (programmatic dependent launch): it lets the next one
come as soon as it starts itself, and waits for the one ahead before it touches memory that a kernel may have written.
"""
