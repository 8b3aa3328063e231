"""Estimates what a run costs before it starts: programs compiled ahead of time, memory, traffic, rooflines, layers."""
