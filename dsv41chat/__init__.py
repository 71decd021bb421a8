"""dsv41chat: a terminal chat for DeepSeek-V4 and V4.1 with an in-process MLX engine."""

from dsv41chat import openblas

__version__ = "0.1.0"

# Here, because nothing of this package is imported before this module.
openblas.choose()
