"""Traffic: length distributions and request traces."""
