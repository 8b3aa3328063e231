"""What a run does besides its steps: start, resume, save, compile ahead, check machines, and report."""
