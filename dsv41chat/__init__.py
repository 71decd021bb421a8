"""dsv41chat: a terminal chat for DeepSeek-V4 and V4.1 with an in-process MLX engine."""

__version__ = "0.1.0"
