"""What runs on the laptop: start a job, or rehearse it here."""
