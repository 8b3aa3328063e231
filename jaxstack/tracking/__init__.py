"""What a run tells of itself: metrics.jsonl, the screen, other services, throughput, goodput and traces."""
