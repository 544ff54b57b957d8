"""Snapshots: written by rank 0 alone, whole or absent, resumed bit for bit."""
