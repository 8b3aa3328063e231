"""Models as declarations of parameters and pure functions: layers, families, and the context that computes them."""
