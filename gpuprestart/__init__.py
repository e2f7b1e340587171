"""gpuprestart: a model server never starts on dirty GPUs."""

__version__ = "0.1.0"
