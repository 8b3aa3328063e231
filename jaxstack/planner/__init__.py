"""What a run would cost: compiling ahead of time, formulas of memory and traffic, rooflines, costs of layers."""
