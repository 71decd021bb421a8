"""Routes: other ways to compute the hot operations, chosen once when a trunk is built and checked there against the stock operations.

`routes` is the registry, `sites` lists where a trunk computes. The GPU routes: `dialect` (one text, two preludes) and `launch` (what MLX is
handed); `text_*` hold the kernel texts; `matrix`, `exl3`, `tensor`, `hyper`, `attend`, `choose`, `finish` and `prompt` make callables of
them; `gpu` says which callable stands where; `metal` and `cuda` are the two devices.
"""
