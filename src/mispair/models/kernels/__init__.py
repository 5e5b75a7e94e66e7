"""GPU kernels, written in Triton: only where torch's own operations are too many and too small."""
