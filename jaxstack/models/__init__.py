"""Models as data and pure functions: declarations of parameters, layers, the decoder family, how to compute them."""
