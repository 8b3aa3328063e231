"""The environment of a process: CPU devices, joining other processes, stop signals, and the watchdog."""
