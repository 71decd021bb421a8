"""Routes: other ways to compute the hot operations, chosen once when a trunk is built and checked there against the stock operations."""
