"""The rehearsal: the request that would be sent, run here on simulated instances that vanish."""
