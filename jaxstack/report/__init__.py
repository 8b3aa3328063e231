"""Summaries of runs: a table for the terminal and a page for the browser, from the files of run directories."""
