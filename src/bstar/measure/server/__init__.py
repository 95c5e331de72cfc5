"""What a running server says about itself: /metrics, read into one set of names for every engine."""
