"""What snapshots cost, beside other ways to save, in one run on one machine: `make benchmark`."""
