"""What the GPUs say about themselves: NVML, DCGM exporter, nvidia-smi logs, read into one table."""
