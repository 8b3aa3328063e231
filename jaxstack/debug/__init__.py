"""Finds the operation that made the first value that is not finite: `search` in any program, `replay` in a step."""
