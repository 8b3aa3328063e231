"""What a run records: metrics.jsonl, the console, other services, throughput, goodput and traces."""
