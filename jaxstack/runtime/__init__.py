"""What surrounds the process: platform, joining other processes, requests to stop, processes that die or hang."""
