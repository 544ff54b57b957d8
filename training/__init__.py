"""What runs in the container: a DDP training job that survives losing its instances."""
