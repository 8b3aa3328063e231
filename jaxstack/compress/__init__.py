"""Makes a trained model smaller: `jaxstack compress quantize` rounds its matrices to few bits.

The pure parts are functions of one matrix [outputs, inputs]: `rounding` (to the nearest), `gptq` and `awq`. `calibrate`
runs a model layer by layer over a few batches, and gives these functions the statistics of every matrix's inputs.
"""
