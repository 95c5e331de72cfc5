"""What a running server stands at, and what to set: diagnosis from its own counters, tuning by measuring."""
