"""Makes a trained model smaller: `jaxstack compress quantize` rounds its matrices, `prune` removes parts of it.

The pure parts are functions of one matrix [outputs, inputs]: `rounding` (to the nearest), `gptq`, `awq` and `sparsity`.
`calibrate` runs a model layer by layer over a few batches, and gives these functions the statistics of every matrix's
inputs. `importance` makes figures of layers, heads and units from them, by which `prune` chooses what stays.
"""
