"""Devices, precision, CUDA graphs, optimizers and threads."""
