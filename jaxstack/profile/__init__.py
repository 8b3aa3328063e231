"""What the layers of a run cost: `costs` measures it, `jaxstack profile` writes it down. JAX is not imported
here, since the command decides first how many devices the CPU is."""
